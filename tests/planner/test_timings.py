"""Measured times: on disk, and where they hold."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rptrain.config.resolve import resolve
from rptrain.engine.meter import Measured
from rptrain.planner.timings import FILE, Conditions, Timings, load
from rptrain.train.job import prepare_job

CONDITIONS = Conditions(("a GPU",), tokens=64, length=32, dtype="bfloat16", layers=3)
MEASURED = Measured((0.1, 0.2, 0.0), (0.3, 1 / 3, 0.5), upload=1e9, download=None, update=0.25, steps=2)
CONFIG = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:random"\n[engine]\ndevices = "cpu:2"\n'


def test_what_was_saved_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, CONDITIONS) is None
    assert Timings(CONDITIONS, replace(MEASURED, steps=1)).save(tmp_path)
    assert Timings(CONDITIONS, MEASURED).save(tmp_path)
    assert load(tmp_path, CONDITIONS) == MEASURED
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert not caplog.records


def test_an_update_without_time_and_an_unwritable_folder_do_not_hinder_plans(tmp_path, caplog):
    assert Timings(CONDITIONS, replace(MEASURED, update=0.0)).save(tmp_path)
    assert not caplog.records
    assert Timings(CONDITIONS, MEASURED).save(tmp_path / "missing")
    assert "cannot be written" in caplog.text


def test_the_format_of_the_file_stays(tmp_path: Path) -> None:
    """A run of an earlier version is not measured again."""
    (tmp_path / FILE).write_text(
        """{"conditions": {"devices": ["a GPU"], "tokens": 64, "length": 32, "dtype": "bfloat16", "layers": 3},
        "measured": {"forward": [0.1, 0.2, 0.0], "backward": [0.3, 0.3333333333333333, 0.5], "upload": 1e9,
        "download": null, "update": 0.25, "steps": 2}}"""
    )
    assert load(tmp_path, CONDITIONS) == MEASURED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices": ("a GPU", "b")}, "the kind of device was a GPU, is a GPU and b;"),
        ({"tokens": 32}, "tokens per micro-batch (train.micro_batch_size × data.max_length) was 64, is 32;"),
        ({"length": 64}, "data.max_length was 32, is 64;"),
        ({"dtype": "float32"}, 'model.dtype was "bfloat16", is "float32";'),
        ({"layers": 4}, "the number of layers was 3, is 4;"),
    ],
)
def test_times_of_other_conditions_are_not_used(tmp_path, caplog, change, said):
    Timings(CONDITIONS, MEASURED).save(tmp_path)
    assert load(tmp_path, replace(CONDITIONS, **change)) is None
    assert f"does not apply: {said} the layers are measured again" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"forward": (0.1, math.nan, 0.0)},
        {"forward": (0.0, 0.2, 0.0)},
        {"forward": (0.1, 0.0)},
        {"forward": ()},
        {"backward": (0.3, 0.3, 0.0)},
        {"backward": (0.3, -0.3, 0.5)},
        {"upload": math.inf},
        {"upload": 5e-324},
        {"backward": (0.3, 1e308, 0.5)},
        {"update": -0.25},
    ],
)
def test_impossible_times_are_not_stored(tmp_path, caplog, change):
    Timings(CONDITIONS, MEASURED).save(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    assert not Timings(CONDITIONS, replace(MEASURED, **change)).save(tmp_path)
    assert "the measured times are not stored" in caplog.text
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"steps"', '"stops"'),
        lambda text: text.replace("0.25", '"0.25"'),
        lambda text: text.replace("0.2,", ""),
        lambda text: text.replace("0.2,", "NaN,"),
        lambda text: text.replace("0.25", "-0.25"),
        lambda text: text.replace("1000000000.0", "0.0"),
        lambda text: text.replace("0.2,", "0.0,"),
        lambda text: text.replace("a GPU", "a \udcff"),
    ],
    ids=["cut", "empty", "list", "key", "text", "shorter", "nan", "negative", "zero", "zero-time", "surrogate"],
)
def test_a_broken_file_is_not_used(tmp_path, caplog, damage):
    Timings(CONDITIONS, MEASURED).save(tmp_path)
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(damage(whole), errors="surrogateescape")
    assert (tmp_path / FILE).read_text(errors="surrogateescape") != whole
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, CONDITIONS) is None
    assert FILE in caplog.text and "measured again" in caplog.text


def test_the_conditions_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    sizes = ("train.micro_batch_size=2", "data.max_length=16", "model.dtype=float32")
    job = prepare_job(resolve(tmp_path / "c.toml", sizes).config)
    found = Conditions.of(job.config, job.spec, job.hardware)
    assert (found.tokens, found.length, found.dtype) == (32, 16, "float32")
    assert found.layers == len(job.spec.layers) + 1
    assert len(found.devices) == 1, "two workers of one kind"
