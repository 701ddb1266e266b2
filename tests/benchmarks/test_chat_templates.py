"""Published chat templates, and whether wrong tokens and masks are seen."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chat_templates.conversations import CONVERSATIONS, leaves
from benchmarks.chat_templates.families import CHATML
from benchmarks.chat_templates.judge import Result, Template, judge
from benchmarks.chat_templates.measure import measure, templates_in, tokenizer_for
from rptrain.data.formats import Tally

from ..data.tokenizer import CHATML as CHATML_TEXT

FOLDER = os.environ.get("RPTRAIN_TEMPLATES", "")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []


@pytest.mark.corpus
@pytest.mark.skipif(not FILES, reason="RPTRAIN_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_a_published_template(name):
    (template,) = [template for template in templates_in(Path(FOLDER), name) if template.name == name]
    verdicts = measure(template, list(CONVERSATIONS))
    assert not {verdict.conversation: verdict.text for verdict in verdicts if verdict.kind == "FAULT"}


# Whether wrong tokens and masks are seen

TEXT = """\
<|im_start|>system
Answer as a blacksmith would.<|im_end|>
<|im_start|>user
What melts first?<|im_end|>
<|im_start|>assistant
Tin melts first.<|im_end|>
<|im_start|>user
And what comes last?<|im_end|>
<|im_start|>assistant
Tungsten comes last.<|im_end|>
"""
NAME = "system and two turns"


@pytest.fixture(scope="module")
def template():
    return Template("chatml", CHATML_TEXT, CHATML, tokenizer_for(CHATML_TEXT, CHATML))


@pytest.fixture
def result(template):
    """Tokens of TEXT with the right mask."""
    ids, mask = list[int](), list[bool]()
    for number, turn in enumerate(TEXT.split("<|im_start|>assistant\n")):
        answer, *_ = turn.partition("\n<|im_start|>user") if number else ("", "", turn)
        for text, supervised in ((answer.rstrip("\n"), True), (turn[len(answer.rstrip("\n")) :], False)):
            tokens = template.tokenizer(text)["input_ids"] if text else []
            ids, mask = ids + tokens, mask + [supervised] * len(tokens)
        if number < 2:
            tokens = template.tokenizer("<|im_start|>assistant\n")["input_ids"]
            ids, mask = ids + tokens, mask + [False] * len(tokens)
    return Result(ids, mask, "", Tally)


def nothing(mask, ids):
    pass


def one_more_after(mask, ids):
    mask[len(mask) - mask[::-1].index(True)] = True


def one_less_at_the_end(mask, ids):
    mask[len(mask) - 1 - mask[::-1].index(True)] = False


def one_less_at_the_beginning(mask, ids):
    mask[mask.index(True)] = False


def the_opener_too(mask, ids):
    start, opener = mask.index(True), ids[0]
    while ids[start] != opener:
        start -= 1
        mask[start] = True


def everything(mask, ids):
    mask[:] = [True] * len(mask)


def none(mask, ids):
    mask[:] = [False] * len(mask)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (nothing, "trained"),
        (one_more_after, "FAULT: a span ends after its end token"),
        (one_less_at_the_end, "FAULT: the end '<|im_end|>\\n' of a turn is not supervised"),
        (one_less_at_the_beginning, "FAULT: content of turn 3 is not supervised"),
        (the_opener_too, "FAULT: the opener of a turn is supervised"),
        (everything, "FAULT: content of turn 1 is supervised"),
        (none, "FAULT: content of turn 3 is not supervised"),
    ],
)
def test_masks(template, result, change, verdict):
    mask = list(result.supervised)
    change(mask, result.ids)
    assert judge(template, CONVERSATIONS[NAME], replace(result, supervised=mask)).startswith(verdict)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (
            "Copper, for one.",
            "FAULT: not noted: content of turn 1",
        ),  # the template writes it where its turn is the last
        ("", "FAULT: dropped in silence: content of turn 2"),
    ],
)
def test_a_text_that_is_missing(template, answer, verdict):
    texts = ("<|im_start|>assistant\n", answer + "<|im_end|>")
    opener, turn = (template.tokenizer(text)["input_ids"] for text in texts)
    result = Result(opener + turn, [False] * len(opener) + [True] * len(turn), "", Tally)
    assert judge(template, CONVERSATIONS["one turn"], result) == verdict


def test_a_refusal_of_what_the_template_writes(template):
    refused = Result(None, [], "it is too hard", Tally)
    assert judge(template, CONVERSATIONS["one turn"], refused).startswith("FAULT: refused, but")
    assert judge(template, CONVERSATIONS["thought in a field"], refused) == "refused: it is too hard"


def test_texts_of_a_row():
    found = [(leaf.turn, leaf.kind, leaf.text) for leaf in leaves(CONVERSATIONS["several calls"]) if leaf.turn == 3]
    names = ["get_weather", "place_order"]
    assert [text for _, kind, text in found if kind == "call name"] == names
    assert {"Kiel-Holtenau", "3741", "raincoat", "card", "825.75"} <= {text for *_, text in found}
