"""The verdicts on conversations with chat templates, each read, rendered, tokenized and masked as for training."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chat_templates.conversations import CONVERSATIONS
from benchmarks.chat_templates.families import FAMILIES, Family, added_tokens, special_tokens
from benchmarks.chat_templates.judge import Result, Template, judge
from rptrain.data.formats import Example, Tally, read
from rptrain.data.row_format import RowFormat
from rptrain.data.template import EncodeOptions, encode
from rptrain.data.tokens import Document

WORDS = ["user assistant system tool hello there, what is the sum of two numbers? it is four.\n\n"] * 4


@dataclass(frozen=True)
class Verdict:
    template: str
    conversation: str
    text: str

    @property
    def kind(self) -> str:
        return self.text.partition(":")[0]


def templates_in(folder: Path, part: str = "") -> Iterator[Template]:
    """The templates of a folder whose name contains `part`, in the order of their names."""
    for file in sorted(folder.glob("*.jinja")):
        if part in file.stem:
            text = file.read_text()
            yield Template(file.stem, text, FAMILIES[file.stem], tokenizer_for(text, FAMILIES[file.stem]))


def tokenizer_for(template: str, family: Family) -> Any:
    """A small byte-level tokenizer with the special tokens of the template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    special = special_tokens(template, family)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(WORDS, trainer)
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    model.add_tokens([AddedToken(token, normalized=False) for token in added_tokens(template) if token not in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=family.bos,
        eos_token=family.eos[0],
        pad_token=family.eos[0],
        additional_special_tokens=special,
        chat_template=template,
    )


def measure(template: Template, names: Sequence[str], reasoning: str = "refuse") -> list[Verdict]:
    """The verdicts on the named conversations."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(CONVERSATIONS[name]) + "\n" for name in names))
        bad = Tally(shown=len(names))
        examples = list(read(file, RowFormat("messages"), bad))
    results = {line: Result(None, [], reason, Tally) for line, reason in _reasons(bad)}
    results |= encoded(template, examples, reasoning)
    return [
        Verdict(template.name, name, judge(template, CONVERSATIONS[name], results[line]))
        for line, name in enumerate(names, 1)
    ]


def encoded(template: Template, examples: list[Example], reasoning: str = "refuse") -> dict[int, Result]:
    """What training makes of the examples, by their lines."""
    ids = frozenset(template.tokenizer.convert_tokens_to_ids(list(template.family.eos)))
    options = EncodeOptions(reasoning=reasoning, eos_ids=ids)

    def documents(some: list[Example], tally: Tally) -> list[Document]:
        found = encode(some, template.tokenizer, options, tally=tally, processes=1)
        return list(found)

    def counted(example: Example) -> Tally:
        tally = Tally(total=1, notes=Counter(example.notes))
        documents([example], tally)
        return tally

    tally = Tally(total=len(examples), shown=len(examples))
    made = {document.line: document for document in documents(examples, tally)}
    results = {line: Result(None, [], reason, Tally) for line, reason in _reasons(tally)}
    for example in examples:
        if (document := made.get(example.line)) is not None:
            mask = document.supervised.tolist()
            results[example.line] = Result(document.ids.tolist(), mask, "", partial(counted, example))
    return results


def _reasons(tally: Tally) -> Iterator[tuple[int, str]]:
    for line, _, reason in (text.partition(": ") for text in tally.first):
        yield int(line), reason
