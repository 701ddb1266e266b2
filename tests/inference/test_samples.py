"""Prompts that a run answers at each evaluation are checked before it starts."""

import pytest

from rptrain.data.loader import load_tokenizer
from rptrain.inference.samples import LONGEST, encode_samples
from rptrain.utils.errors import UserError

from .. import run_tools as tools

VOCABULARY = 105  # of the preset's tokenizer


@pytest.mark.parametrize(
    ("prompt", "vocabulary", "message"),
    [
        ("a " * LONGEST, VOCABULARY, "log.sample_prompts: prompt 2 has 5\\d\\d tokens"),
        ("a", 7, "and the model's vocabulary has 7"),
    ],
    ids=["long", "vocabulary"],
)
def test_what_cannot_be_answered(prompt, vocabulary, message):
    tokenizer = load_tokenizer(tools.PRESET)
    assert len(encode_samples(tokenizer, ["a", "b"], VOCABULARY)) == 2
    with pytest.raises(UserError, match=message):
        encode_samples(tokenizer, ["a", prompt], vocabulary)


def test_without_a_chat_template_the_text_itself_is_continued():
    tokenizer = load_tokenizer(tools.PRESET)
    tokenizer.chat_template = None
    (tokens,) = encode_samples(tokenizer, ["a" * LONGEST], VOCABULARY)
    assert tokens == tokenizer("a" * LONGEST)["input_ids"]
