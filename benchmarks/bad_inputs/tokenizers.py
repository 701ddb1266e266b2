"""Tokenizers."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.bad_inputs.case import GENERATE, TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import changed, cut, deleted, fifo, text, values

AREA = "tokenizers"
FILE, CONFIG = "model/tokenizer.json", "model/tokenizer_config.json"


def tokenizer(change: Callable[[Any], object]) -> Edit:
    return changed(FILE, change)


def added(*tokens: tuple[int, str]) -> Edit:
    """Adds tokens to those of the tokenizer."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return tokenizer(
        lambda content: content["added_tokens"].extend({"id": id, "content": token} | flags for id, token in tokens)
    )


def split_at(expression: str) -> Edit:
    return tokenizer(lambda content: content["pre_tokenizer"]["pattern"].update(Regex=expression))


def word(id: int) -> Edit:
    """The letter b with another id."""
    return tokenizer(lambda content: content["model"]["vocab"].update(b=id))


def prepended(content: Any) -> None:
    """A normalizer that puts 20 MB before each text."""
    content["normalizer"] = {"type": "Prepend", "prepend": "a" * 20_000_000}


CATASTROPHIC = "(([a-z\\s:]+)+)+!"
CASES: tuple[tuple[int, str, tuple[Edit, ...], tuple[str, ...], Outcome], ...] = (
    (679, "missing", (deleted(FILE),), TRAIN, "refused"),
    (680, "missing", (deleted(FILE),), GENERATE, "refused"),
    (681, "bytes", (text(FILE, bytes(range(256))),), TRAIN, "refused"),
    (682, "cut short", (cut(FILE, 1000),), TRAIN, "refused"),
    (683, "empty object", (text(FILE, "{}"),), TRAIN, "refused"),
    (684, "a pipe", (fifo(FILE),), TRAIN, "refused"),
    (685, "config that is a pipe", (fifo(CONFIG),), TRAIN, "either"),
    (686, "broken config", (text(CONFIG, "{]"),), TRAIN, "refused"),
    (687, "config that is a list", (text(CONFIG, "[]"),), TRAIN, "refused"),
    (688, "unknown class", (values(CONFIG, {"tokenizer_class": "os.system"}),), TRAIN, "either"),
    (689, "class that is a number", (values(CONFIG, {"tokenizer_class": 5}),), TRAIN, "refused"),
    (690, "end token that is a table", (values(CONFIG, {"eos_token": {"a": 1}}),), TRAIN, "refused"),
    (691, "end token that is a number", (values(CONFIG, {"eos_token": 5}),), TRAIN, "refused"),
    (692, "end token that is new", (values(CONFIG, {"eos_token": "<|new|>"}),), TRAIN, "either"),
    (693, "length of text", (values(CONFIG, {"model_max_length": "x"}),), TRAIN, "either"),
    (694, "odd added tokens", (values(CONFIG, {"added_tokens_decoder": {"x": 5}}),), TRAIN, "refused"),
    (
        695,
        "added token of 10**9",
        (values(CONFIG, {"added_tokens_decoder": {"1000000000": {"content": "q"}}}),),
        TRAIN,
        "either",
    ),
    (696, "deep config", (text(CONFIG, '{"a":' * 100_000),), TRAIN, "refused"),
    (697, "100,000 added tokens", (added(*((105 + i, f"<{i}>") for i in range(100_000))),), TRAIN, "either"),
    (698, "added token of -1", (added((-1, "<q>")),), TRAIN, "refused"),
    (699, "added token of 10 MB", (added((105, "q" * 10_000_000)),), TRAIN, "either"),
    (700, "word of 2**31", (word(2**31),), TRAIN, "either"),
    (701, "word beyond the vocabulary", (word(1104),), TRAIN, "refused"),
    (702, "catastrophic expression", (split_at(CATASTROPHIC),), TRAIN, "either"),
    (703, "broken expression", (split_at("((("),), TRAIN, "refused"),
    (704, "normalizer that multiplies", (tokenizer(prepended),), TRAIN, "either"),
)


def cases() -> Iterator[Case]:
    for number, name, edits, args, expected in CASES:
        does = "generating" if args is GENERATE else "training"
        yield Case(number, AREA, f"{does}: {name}", args, expected, edits, "token")
    pipes = fifo("model/vocab.json"), fifo("model/merges.txt")
    yield Case(753, AREA, "training: vocabulary that is a pipe", TRAIN, "either", pipes, "model/merges.txt")
