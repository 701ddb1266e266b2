"""Compare the loss of one training step on tool calls with that of a plain loop of transformers with TRL's masks.

python -m benchmarks.chat_templates.trl_step OUT.json [--devices cpu:1] [--templates NAME...]

For each template, a small model with random float32 weights is trained for one step by rptrain, with the template as
published. The loop computes the loss of the same conversations one by one, with tokens and masks of TRL's training
template, but for labels that differ for a reason listed in `trl_masks.REASONS`, which are counted. Exits with status 1
if a relative difference exceeds 1e-6. Needs `pip install trl`.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.chat_templates.conversations import CONVERSATIONS
from benchmarks.chat_templates.families import Family
from benchmarks.chat_templates.judge import Result, Template
from benchmarks.chat_templates.measure import encoded, tokenizer_for
from benchmarks.chat_templates.trl_masks import family_of, reason_for, trl_mask, trl_templates
from benchmarks.commit import commit
from rptrain.config.resolve import resolve
from rptrain.data.formats import read
from rptrain.data.row_format import RowFormat
from rptrain.runs.records import events
from rptrain.train.run import train

TEMPLATES = ("glm4moe", "gptoss", "qwen2_5")
NAMES = ("call, content empty", "call, content text", "several calls")
LENGTH = 2048
TOLERANCE = 1e-6
CONFIG = """
[model]
path = "{folder}/model"
dtype = "float32"

[[data.train]]
path = "{folder}/rows.jsonl"

[data]
max_length = {length}
packing = false
cache_dir = "{folder}/cache"

[train]
micro_batch_size = 1
global_batch_size = {rows}
max_steps = 1

[engine]
devices = "{devices}"

[optim]
update = "sync"

[save]
output_dir = "{folder}/runs"

[log]
run_name = "step"
"""


@dataclass(frozen=True)
class Outcome:
    template: str
    conversations: list[str]
    labels: int
    changed: int  # labels that only TRL or only rptrain has, for a reason of REASONS
    loss: float
    loop: float
    difference: float  # relative to `loop`


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.chat_templates.trl_step", description="Compare a training step with TRL's masks."
    )
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the JSON file to write")
    parser.add_argument("--devices", default="cpu:1", help="engine.devices of the runs (default: cpu:1)")
    parser.add_argument("--templates", nargs="+", default=TEMPLATES, metavar="NAME", help="names of TRL's templates")
    given = parser.parse_args(arguments)
    folder = trl_templates()
    outcomes = list[Outcome]()
    for name in given.templates:
        published, training = ((folder / f"{name}{end}.jinja").read_text() for end in ("", "_training"))
        outcomes.append(compare(name, published, training, given.devices))
        print(outcomes[-1], flush=True)
    head = {"commit": commit(), "trl": version("trl"), "torch": torch.__version__, "devices": given.devices}
    given.out.write_text(json.dumps({**head, "results": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    return int(any(one.difference > TOLERANCE for one in outcomes))


def compare(name: str, published: str, training: str, devices: str) -> Outcome:
    family = family_of(name)
    tokenizer = tokenizer_for(published + training, family)
    tokenizer.chat_template = published
    template = Template(name, published, family, tokenizer)
    with TemporaryDirectory() as text:
        folder = Path(text)
        write_model(folder / "model", tokenizer, family)
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(CONVERSATIONS[conversation]) + "\n" for conversation in NAMES))
        results = encoded(template, list(read(file, RowFormat("messages"))))
        used = {line: conversation for line, conversation in enumerate(NAMES, 1) if results[line].ids is not None}
        file.write_text("".join(json.dumps(CONVERSATIONS[conversation]) + "\n" for conversation in used.values()))
        config = folder / "run.toml"
        config.write_text(CONFIG.format(folder=folder, length=LENGTH, rows=len(used), devices=devices))
        run = train(resolve(config, ()), quiet=True)
        (step,) = (event for event in events.read(run.events_path) if isinstance(event, events.Step))
        model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    total, labels, changed = 0.0, 0, 0
    for line, conversation in used.items():
        ids, mask, differing = expected(template, training, CONVERSATIONS[conversation], results[line])
        total += loss(model, ids, mask)
        labels, changed = labels + sum(mask), changed + differing
    loop = total / labels
    if labels != step.supervised:
        raise SystemExit(f"{name}: rptrain has {step.supervised} labels, the loop {labels}")
    return Outcome(name, [*used.values()], labels, changed, step.loss, loop, abs(step.loss - loop) / loop)


def write_model(folder: Path, tokenizer: Any, family: Family) -> None:
    """A small model with random float32 weights, and its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(family.eos)),
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def expected(template: Template, training: str, row: dict[str, Any], ours: Result) -> tuple[list[int], list[bool], int]:
    """TRL's tokens, its mask but for what REASONS names, and in how many labels that differs from TRL's.

    Where rptrain appends an end token, which TRL's template does not write, it is appended here too.
    """
    theirs = trl_mask(template.tokenizer, training, row)
    if theirs is None or ours.ids is None:
        raise SystemExit(f"{template.name}: refused by TRL's template")
    ids, mask = theirs
    if ours.ids[: len(ids)] != ids:
        raise SystemExit(f"{template.name}: TRL's training template writes another text")
    for place, (we, they) in enumerate(zip(ours.supervised, mask, strict=False)):
        if we != they and reason_for(template, theirs, ours.supervised, place) is None:
            raise SystemExit(f"{template.name}: token {place} differs: run benchmarks.chat_templates.trl_masks")
    kept = ours.supervised[: len(ids)]  # each difference has its reason
    changed = sum(we != they for we, they in zip(kept, mask, strict=True))
    return ours.ids, [*kept, *ours.supervised[len(ids) :]], changed


def loss(model: Any, ids: list[int], mask: list[bool]) -> float:
    """The sum of the losses of the labels."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    targets, counted = torch.tensor(ids[1:]), torch.tensor(mask[1:])
    return torch.nn.functional.cross_entropy(logits[counted], targets[counted], reduction="sum").item()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
