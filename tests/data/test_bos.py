"""One BOS token stands at the beginning of a row: a second one is removed, and none is added."""

import pytest

from rptrain.data import template
from rptrain.data.formats import Example, Tally
from rptrain.data.template import EncodeOptions, encode

from .tokenizer import CHATML, make

BOS = "<|begin_of_text|>"
SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}]


@pytest.fixture(scope="module")
def adding():
    """A tokenizer that adds a BOS token itself, as Llama's do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make()
    tokenizer.bos_token = BOS
    number = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, number)])
    return tokenizer


def tokens(example, tokenizer, **options):
    """The text of all tokens, that of the supervised ones, and whether a BOS token was removed."""
    tally = Tally()
    (document,) = encode([example], tokenizer, EncodeOptions(**options), tally=tally)
    assert tally.bad == 0
    return tokenizer.decode(document.ids), tokenizer.decode(document.ids[document.supervised]), tally.notes["bos"] == 1


def test_texts(adding):
    assert tokens(Example("f", 1, text="hello"), adding) == (
        BOS + "hello<|endoftext|>",
        BOS + "hello<|endoftext|>",
        False,
    )
    assert tokens(Example("f", 1, text=BOS + "hello"), adding)[::2] == (BOS + "hello<|endoftext|>", True)
    assert tokens(Example("f", 1, text=BOS + "hello"), make())[0] == BOS + "hello<|endoftext|>"


def test_prompts_with_completions(adding):
    example = Example("f", 1, text=BOS + "hello there", prompt=len(BOS + "hello"))
    assert tokens(example, adding) == (BOS + "hello there<|endoftext|>", " there<|endoftext|>", True)


def test_conversations(adding):
    once = BOS + "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi there<|im_end|>\n"
    for begin, removed in (("{{ bos_token }}", False), ("{{ bos_token }}{{ bos_token }}", True)):
        found = tokens(Example("f", 1, messages=SAID), adding, chat_template=begin + CHATML)
        assert found == (once, "hi there<|im_end|>", removed)
    assert tokens(Example("f", 1, messages=SAID), adding)[0] == once.removeprefix(BOS), "the template writes none"


def test_long_texts(adding, monkeypatch):
    monkeypatch.setattr(template, "SHORT", 0)
    monkeypatch.setattr(template, "CHUNK_TEXT", 24)
    text = "hello there\nit is four\n"
    for begin in ("", BOS):
        assert tokens(Example("f", 1, text=begin + text), adding)[0] == BOS + text + "<|endoftext|>"
