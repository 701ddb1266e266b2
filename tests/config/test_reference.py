"""The reference of keys: `rptrain --keys` and docs/guide/config.md."""

from pathlib import Path

from rptrain.config.reference import WIDTH, markdown, tables, text
from rptrain.config.schema import keys

FILE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "config.md"


def test_the_guide_is_up_to_date():
    expected = "run `python -m rptrain.config.reference > docs/guide/config.md`"
    assert FILE.read_text(encoding="utf-8") == markdown(), expected


def test_every_key_has_its_line_type_and_default():
    entries = {entry.key: entry for table in tables() for entry in table.entries}
    assert set(entries) == set(keys())
    assert all(entry.type and entry.default and entry.text.endswith(".") for entry in entries.values())
    assert entries["model.path"].default == "required" and entries["data.cache_dir"].default == "unset"
    assert entries["optim.betas"].default == "[0.9, 0.999]" and entries["optim.betas"].type == "list of numbers"
    assert entries["optim.update"].type == '"async", "sync"' and entries["engine.vram_limit"].type == "size"
    assert entries["train.micro_batch_size"].type == 'whole number or "auto"'


def test_the_text_fits_a_narrow_terminal():
    lines = text().splitlines()
    assert max(map(len, lines)) <= WIDTH and all(f"  {key}  (" in text() for key in keys())
