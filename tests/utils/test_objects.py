"""Duplicate keys of JSON objects, in files that other libraries read."""

import pytest

from rptrain.utils.errors import UserError
from rptrain.utils.objects import check_keys


def test_duplicate_keys_are_refused(tmp_path):
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"a": {"b": 1, "c": 2, "b": 1}}')
    with pytest.raises(UserError, match=r"tokenizer_config.json: an object has the key 'b' twice: keep one of them"):
        check_keys(file)


@pytest.mark.parametrize("text", [b'{"a": 1}', b"[1, 2]", b"{", b"\xff", b'{"a":' * 100_000, b""])
def test_other_mistakes_are_left_to_the_reader(tmp_path, text):
    file = tmp_path / "generation_config.json"
    file.write_bytes(text)
    check_keys(file)
