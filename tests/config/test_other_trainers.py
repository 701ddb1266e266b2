"""The guide for people who know other trainers."""

import re
import tomllib
from pathlib import Path

import pytest

from rptrain.config.aliases import ADVICE, ALIASES, UNAVAILABLE, answer, keys_in
from rptrain.config.errors import leaves
from rptrain.config.other_trainers import TITLE, markdown

FILE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "from-other-trainers.md"
YAML, TOML = (re.findall(rf"^```{kind}\n(.*?)^```", TITLE, re.MULTILINE | re.DOTALL)[0] for kind in ("yaml", "toml"))
SET = {".".join(part for part in key if isinstance(part, str)) for key in leaves(tomllib.loads(TOML))}


def test_the_guide_is_up_to_date_and_has_every_word():
    assert FILE.read_text(encoding="utf-8") == markdown(), "run the command at its end"
    words = {word for words in ALIASES.values() for word in words.split() if "." not in word}
    words |= {word for word in (*ADVICE, *UNAVAILABLE) if "." not in word}
    assert [word for word in words if f"`{word}`" not in markdown()] == []


@pytest.mark.parametrize("line", YAML.splitlines(), ids=lambda line: line.partition(":")[0])
def test_each_key_of_the_example_is_answered_with_what_its_translation_sets(line):
    key, _, value = line.partition(": ")
    said = answer(key, value)
    assert "remove it" in said or any(name.startswith(tuple(keys_in(said))) for name in SET)
