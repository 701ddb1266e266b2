"""Compare masks with those of TRL's training templates, token by token.

python -m benchmarks.chat_templates.trl_masks OUT.json [--template TEXT]

TRL ships chat templates twice: as published, and for training with `{% generation %}` marks. Each conversation is
tokenized and masked by transformers with the training template, which is what TRL's SFTTrainer trains on, and by
rptrain with the published template ("published") and with the training template ("marked"). Masks are compared where
the tokens are equal; tokens that rptrain appends are left out of the comparison. Differences that are meant are listed
in REASONS; any other exits with status 1. Needs `pip install trl`.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chat_templates.conversations import CONVERSATIONS, Row
from benchmarks.chat_templates.families import CHATML, COHERE, DEEPSEEK, FAMILIES, GLM, LLAMA, MISTRAL, Family
from benchmarks.chat_templates.judge import FAILURES, Result, Template
from benchmarks.chat_templates.measure import encoded, tokenizer_for
from benchmarks.commit import commit
from rptrain.data.formats import read
from rptrain.data.render import Template as Dated
from rptrain.data.row_format import RowFormat

NAMES = (
    "one turn",
    "system and two turns",
    "thought in a field",
    "thoughts in the content",
    "call, content empty",
    "call, content text",
    "several calls",
    "thoughts and a call",
)
GEMMA, PHI = FAMILIES["google-gemma-2-2b-it"], FAMILIES["microsoft-Phi-3.5-mini-instruct"]
UTTERANCE = Family(
    ("<end_of_utterance>",), ("<end_of_utterance>",), ("Assistant:",), "<|im_start|>", added=("<end_of_utterance>",)
)
TABLE = {  # by the beginnings of the names of TRL's files
    "cohere": COHERE,
    "deepseek": DEEPSEEK,
    "diffusion_gemma": FAMILIES["google-gemma-4-31B-it"],
    "gemma": GEMMA,
    "glm4moe": GLM,
    "gptoss": FAMILIES["openai-gpt-oss-120b"],
    "idefics3": UTTERANCE,
    "lfm2": replace(CHATML, bos="<|startoftext|>"),
    "llama3": LLAMA,
    "llava_next": MISTRAL,
    "muse_glimmer": FAMILIES["muse-glimmer"],
    "nemotron": CHATML,
    "phi3": PHI,
    "qwen": CHATML,
    "smolvlm": UTTERANCE,
}
BREAK, PREFILL, SECOND, OPENER, ENDING = "line break", "prefill", "second end", "opener", "end"
REASONS = {
    BREAK: "TRL also trains on the line break after the end token, which the model never has to write.",
    PREFILL: "TRL also trains on the beginning of the thought that the generation prompt writes.",
    SECOND: "TRL also trains on the end-of-text token after the end token of the last turn.",
    OPENER: "TRL also trains on the opener of the turn, which the generation prompt writes.",
    ENDING: "rptrain also trains on the EOS token that follows a turn and ends the answer when the model writes it.",
}
Mask = tuple[list[int], list[bool]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.chat_templates.trl_masks", description="Compare masks with TRL's training templates."
    )
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the JSON file to write")
    parser.add_argument("--template", default="", help="only the templates whose name contains this")
    given = parser.parse_args(arguments)
    folder = trl_templates()
    table = list[list[str]]()
    for file in sorted(folder.glob("*_training.jinja")):
        name = file.stem.removesuffix("_training")
        if given.template in name:
            found = compare(name, (folder / f"{name}.jinja").read_text(), file.read_text())
            table += found
            for row in found:
                if row[3].startswith("DIFFERENT"):
                    print(" | ".join(row), flush=True)
    kinds = Counter(verdict.partition(":")[0] for *_, verdict in table)
    head = {"commit": commit(), "trl": version("trl"), "verdicts": dict(sorted(kinds.items())), "reasons": REASONS}
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in table)
    given.out.write_text(f'{json.dumps(head)[:-1]}, "table": [\n{rows}\n]}}\n')
    print(dict(sorted(kinds.items())))
    return int(kinds["DIFFERENT"] > 0)


def trl_templates() -> Path:
    """The folder of TRL's templates. TRL is not imported, so its dependencies may be missing."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        raise SystemExit("TRL is not installed: pip install trl")
    return Path(spec.origin).parent / "chat_templates"


def family_of(name: str) -> Family:
    return next(family for begin, family in TABLE.items() if name.startswith(begin))


def compare(name: str, published: str, training: str) -> list[list[str]]:
    """Rows of the table: template, "published" or "marked", conversation, verdict."""
    family = family_of(name)
    tokenizer = tokenizer_for(published + training, family)
    with TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(CONVERSATIONS[conversation]) + "\n" for conversation in NAMES))
        examples = list(read(file, RowFormat("messages")))
    rows = list[list[str]]()
    for kind, text in (("published", published), ("marked", training)):
        tokenizer.chat_template = text
        template = Template(name, text, family, tokenizer)
        results = encoded(template, examples)
        for conversation, example in zip(NAMES, examples, strict=True):
            verdict = _compared(template, training, CONVERSATIONS[conversation], results[example.line])
            rows.append([name, kind, conversation, verdict])
    return rows


def trl_mask(tokenizer: Any, training: str, row: Row) -> Mask | None:
    """Tokens and mask as TRL has them, with rptrain's date; None if the template refuses the conversation."""
    training = Dated.of(tokenizer, training).variant(None)
    try:
        made = tokenizer.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            chat_template=training,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except FAILURES:
        return None
    return made["input_ids"], [bool(mask) for mask in made["assistant_masks"]]


def _compared(template: Template, training: str, row: Row, ours: Result) -> str:
    theirs = trl_mask(template.tokenizer, training, row)
    if ours.ids is None:
        return f"refused: {ours.reason}" if theirs else f"refused by both: {ours.reason}"
    if theirs is None:
        return "refused by TRL's"
    count = len(theirs[0])
    if ours.ids[:count] != theirs[0]:
        return "rendered differently"
    counts = Counter[str]()
    unexplained = list[str]()
    for place, (we, they) in enumerate(zip(ours.supervised, theirs[1], strict=False)):
        if we != they:
            reason = reason_for(template, theirs, ours.supervised, place)
            if reason is None:
                token = template.tokenizer.decode([theirs[0][place]])
                before = template.tokenizer.decode(theirs[0][max(0, place - 8) : place])
                unexplained.append(f"{'rptrain' if we else 'TRL'} trains {token!r} after {before[-40:]!r}")
            else:
                counts[reason] += 1
    appended = len(ours.ids) - count
    if unexplained:
        return f"DIFFERENT: {'; '.join(unexplained[:4])}"
    described = [f"{reason} {number}" for reason, number in sorted(counts.items())]
    described += [f"{template.tokenizer.decode(ours.ids[count:])} appended"] if appended else []
    return f"equal but for: {', '.join(described)}" if described else "equal"


def reason_for(template: Template, theirs: Mask, supervised: list[bool], place: int) -> str | None:
    """The reason for a token that only TRL or only rptrain trains on; None if there is none."""
    ids, family, decode = theirs[0], template.family, template.tokenizer.decode
    if supervised[place]:
        ends = place > 0 and supervised[place - 1] and supervised[place + 1 : place + 2] != [True]
        return ENDING if ends and decode([ids[place]]) in family.eos else None
    before = place - 1
    while before >= 0 and not decode([ids[before]]).strip():
        before -= 1
    token, last = decode([ids[place]]), decode([ids[before]]) if before >= 0 else ""
    if not token.strip() and last in (*family.ends, *family.eos):
        return BREAK
    if token in family.eos and last in family.ends:
        return SECOND
    after = place
    while after < len(ids) and not supervised[after]:
        after += 1
    until = decode(ids[:after])
    opener = max(family.opens, key=until.rfind)
    begun = len(decode(ids[:place]))
    if opener in until and until.rfind(opener) <= begun < until.rfind(opener) + len(opener):
        return OPENER
    return PREFILL if opener in until and template.prefill.startswith(until.rpartition(opener)[2]) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
