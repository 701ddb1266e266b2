"""Texts that are tokenized in parts: their tokens, and the memory that they take."""

import io
import json
import subprocess
import sys
from inspect import getsource
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rptrain.data import template, tokens
from rptrain.data.excerpt import Limits, excerpt
from rptrain.data.formats import Example
from rptrain.data.loader import load_tokenizer
from rptrain.data.template import encode
from rptrain.data.tokens import Builder, Document, ids_of, tokenized
from rptrain.models.locate import PRESETS
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes

from .. import own_memory
from .test_excerpt import config
from .tokenizer import make

TEXTS = [
    "hello there, what is the sum of two numbers?\n",
    " leading and trailing \t\n\n  \r\n spaces   ",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|> <|endoftext|><tag> <tag>",
    "naïve café, cafe\u0301, Ａｂｃ, ﬁ, Straße, İstanbul",
    "你好,世界。こんにちは 한국어 สวัสดี नमस्ते שלום مرحبا",
    "👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪 \u200b\ufeff\u2028\x00\x1f 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]


def byte_level(**options: Any) -> Any:
    tokenizer = make()
    tokenizer.split_special_tokens = options.get("split", False)
    return tokenizer


def metaspace() -> Any:
    """With a normalizer, a prefix before every text, a special token around each, and an added token that strips."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    tokenizer = make()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.bos_token = "<|begin_of_text|>"
    number = tokenizer.bos_token_id
    ends = [("<|begin_of_text|>", number), ("<|endoftext|>", tokenizer.eos_token_id)]
    backend.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A <|endoftext|>", pair=None, special_tokens=ends
    )
    tokenizer.add_tokens([AddedToken("<tag>", lstrip=True, rstrip=True)])
    return tokenizer


KINDS = {
    "byte level": byte_level,
    "special tokens split": lambda: byte_level(split=True),
    "metaspace": metaspace,
    "tiny-tasks": lambda: load_tokenizer(PRESETS / "tiny-tasks"),
}


def joined(tokenizer: Any, text: str, size: int) -> list[int]:
    """The tokens of a text from calls of the tokenizer for each part."""
    parts, start = [], 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        parts.append(tokenized(tokenizer, text[start:stop], add_special_tokens=False)["input_ids"])
        start = stop
    begin = tokenized(tokenizer, "")["input_ids"]
    begin = begin[:-1] if begin[-1:] == [tokenizer.eos_token_id] else begin
    if begin and parts[0][:1] == begin[-1:]:
        parts[0] = parts[0][1:]
    end = [] if parts[-1][-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id]
    return [*begin, *(token for part in parts for token in part), *end]


@pytest.mark.sample(1, gate=4)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_calls_of_the_tokenizer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS[kind]()
    for text in ("", *TEXTS, "".join(TEXTS)):
        expected = tokenized(tokenizer, text, add_special_tokens=False)["input_ids"]
        found = ids_of(tokenizer, text)
        assert found.dtype == np.int32 and found.tolist() == expected, text
    monkeypatch.setattr(template, "SHORT", 0)
    whole = "".join(TEXTS)
    for size in (1, 7, 50, len(whole) - 1):
        monkeypatch.setattr(template, "CHUNK_TEXT", size)
        for text in (whole, "<|begin_of_text|>" + whole, whole + "<|endoftext|>", whole[::-1]):
            (document,) = encode([Example("f", 1, text=text)], tokenizer, processes=1)
            assert document.ids.tolist() == joined(tokenizer, text, size), (size, text)
            assert document.supervised.all() and len(document.supervised) == len(document.ids)


def test_tokens_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(10, dtype=np.int32)
    written = []
    for size in (3, 100):
        monkeypatch.setattr(tokens, "PIECE", size)
        file = io.BytesIO()
        Builder(file.write).add(Document(1, ids, ids % 3 == 0))
        written.append(file.getvalue())
    assert written[0] == written[1] == np.where(ids % 3 == 0, ~ids, ids).tobytes()


def test_a_row_that_takes_more_memory_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SHORT", 10)
    monkeypatch.setattr(template, "CHUNK_TEXT", 100)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    rendered = len("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthere<|im_end|>\n")
    for example, needed in (
        (Example("f", 3, text="a " * 500), template.parts_bytes(1000)),
        (Example("f", 3, text="a " * 500, prompt=2), 1000 * template.WHOLE_BYTES),
        (Example("f", 3, messages=chat), rendered * template.WHOLE_BYTES),
    ):
        monkeypatch.setattr(template, "available_bytes", lambda needed=needed: needed)
        assert list(encode([example], make()))
        monkeypatch.setattr(template, "available_bytes", lambda needed=needed: needed - 1)
        with pytest.raises(UserError, match=f"f:3: tokenizing this row takes about {format_bytes(needed)} of host"):
            list(encode([example], make()))


def test_few_long_texts_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SHORT", 10)
    monkeypatch.setattr(template, "ROW_BYTES", 100)
    monkeypatch.setattr(template, "WAITING", 450)
    lines = count(1)
    examples = (Example("f", line, text="it is four " * 10) for line in lines)
    documents = encode(examples, make(), processes=8)
    assert [document.line for document in islice(documents, 3)] == [1, 2, 3]
    assert next(lines) == 8, "four wait besides the three"


def test_a_plan_reads_one_of_several_long_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps({'text': 'it is four ' * 100})}\n" * 20)
    set_ = config(path)
    monkeypatch.setattr("rptrain.data.excerpt.HASHED", 0)
    found = excerpt(set_.data.train[0], set_.data, make(), Limits(rows=64, characters=1000, seconds=60.0))
    assert found.share == pytest.approx(1 / 20) and len(found.parts[0].stream) == 1


PEAK = """
import sys
from pathlib import Path
from rptrain.data.loader import Tokenizing, load_tokenizer
from rptrain.data.row_format import RowFormat
from rptrain.data.template import EncodeOptions

folder = Path(sys.argv[1])
settings = Tokenizing(load_tokenizer(sys.argv[2]), EncodeOptions(), folder / "cache")
Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
before = kib()["VmRSS"]
settings.streams([folder / "row.jsonl"], RowFormat(), 0.0)
print(kib()["VmHWM"] - before)
"""


@pytest.mark.long
def test_the_memory_of_a_long_row(tmp_path: Path) -> None:
    """Besides that of its tokens, its line as bytes and as text, which are copied while they are decoded."""
    size = 3 * template.CHUNK_TEXT
    (tmp_path / "row.jsonl").write_text(json.dumps({"text": ("two and two is four" * 10 + "\n") * (size // 191)}))
    line = [
        sys.executable,
        "-P",
        "-c",
        getsource(own_memory) + PEAK,
        str(tmp_path),
        str(PRESETS / "tiny-tasks"),
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert int(done.stdout) << 10 < template.parts_bytes(size) + 4 * size
