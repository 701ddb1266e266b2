"""The speed that an earlier run measured, beside that of a plan."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rptrain.config.schema import Config
from rptrain.planner.past_speed import PastSpeed, past_speed

from .. import run_tools as tools
from ..tui.recorded import make_run

DEVICES = ("cuda:0", "cuda:1")


def settings(folder: Path, **sections: Any) -> Config:
    values = {
        "model": {"path": "llama-3.1-8b"},
        "data": {"train": [{"path": "x.jsonl"}]},
        "save": {"output_dir": str(folder)},
    }
    return Config.model_validate(values | sections)


def test_the_newest_run_with_the_same_settings_on_the_same_devices(tmp_path: Path):
    make_run(tmp_path, "old", devices=2, end="finished", alive=False)
    make_run(tmp_path, "other", devices=2, end="finished", alive=False, model="qwen3-1.7b")
    make_run(tmp_path, "short", devices=2, steps=7)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("[")
    found = past_speed(settings(tmp_path, train={"max_steps": 7}, optim={"learning_rate": 1e-3}), DEVICES)
    assert found is not None and found.run == "old" and found.tokens_per_second > 0
    assert past_speed(settings(tmp_path), DEVICES[:1]) is None


def test_the_newest_runs_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rptrain.planner.past_speed.RUNS", 1)
    for name, model, time in (("old", "llama-3.1-8b", 1000), ("new", "qwen3-1.7b", 2000)):
        run = make_run(tmp_path, name, devices=2, end="finished", alive=False, model=model)
        os.utime(run / "config.toml", (time, time))
    assert past_speed(settings(tmp_path), DEVICES) is None
    found = past_speed(settings(tmp_path, model={"path": "qwen3-1.7b"}), DEVICES)
    assert found is not None and found.run == "new"


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"method": "lora"}},
        {"train": {"micro_batch_size": 2}},
        {"data": {"train": [{"path": "x.jsonl"}], "max_length": 64}},
        {"engine": {"vram_limit": "9GiB"}},
        {"optim": {"update": "sync"}},
        {"model": {"path": "llama-3.1-8b", "dtype": "float32"}},
    ],
)
def test_other_settings_have_another_speed(tmp_path: Path, sections: dict[str, Any]):
    make_run(tmp_path, "old", devices=2, end="finished", alive=False)
    assert past_speed(settings(tmp_path), DEVICES) is not None
    assert past_speed(settings(tmp_path, **sections), DEVICES) is None


def test_a_speed_of_another_machine_does_not_count(tmp_path: Path):
    events = make_run(tmp_path, "copied", devices=2, end="finished", alive=False) / "events.jsonl"
    records = [json.loads(line) for line in events.read_text().splitlines()]
    elsewhere = [record | ({"host": "elsewhere"} if "host" in record else {}) for record in records]
    events.write_text("".join(f"{json.dumps(record)}\n" for record in elsewhere))
    assert past_speed(settings(tmp_path), DEVICES) is None


def test_a_folder_without_runs(tmp_path: Path):
    assert past_speed(settings(tmp_path / "none"), DEVICES) is None


def test_a_plan_takes_its_time_from_the_measured_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rptrain.planner.report.past_speed", lambda *_: PastSpeed("old", 100.0))
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    found = json.loads(tools.invoke("plan", "--config", "run.toml", "--json").stdout)
    length = found["length"]
    assert length["measured_seconds"] == length["steps"] * found["step"]["tokens"] / 100 and length["seconds"]
    assert length["measured_in"] == "old"
    said = tools.invoke("plan", "--config", "run.toml").stdout
    assert "measured in the run old with these settings: 100 tokens/s" in " ".join(said.split())


def test_a_run_that_has_only_warmed_up_has_no_speed(tmp_path: Path):
    """As one that was resumed again and again for two steps."""
    run = make_run(tmp_path, "warm", devices=2, steps=10, end="finished", alive=False)
    assert past_speed(settings(tmp_path), DEVICES) is not None
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace('"event":"step"', '"event":"step","warm_up":true'))
    assert past_speed(settings(tmp_path), DEVICES) is None
