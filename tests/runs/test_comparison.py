"""Runs side by side: their curves, results and settings that differ."""

from pathlib import Path

import pytest

from rptrain.runs.folder.comparison import AXES, METRICS, Axis, Row, comparable, curve, differences, results
from rptrain.runs.view.run_view import RunView

from .test_view import START, process, step, write

CONFIG = """\
[model]
path = "tiny-tasks"
[[data.train]]
path = "builtin:tasks"
[optim]
learning_rate = {rate}
"""


def score(step: int, value: float | None, name: str = "loss") -> dict:
    return {"event": "evaluation", "time": 100.0 + 2 * step, "step": step, "name": name, "score": value}


def viewed(run: Path, *records: dict) -> RunView:
    run.mkdir()
    write(run, START, process(), *records)
    return RunView(run)


def report(number: int, tokens: int, speed: float, loss: float | None = 2.0) -> dict:
    return {**step(number, loss), "tokens": tokens, "tokens_per_second": speed}


@pytest.mark.parametrize(
    ("axis", "reported", "scored"),
    [
        ("steps", [5, 10, 20], [0, 10, 15]),
        ("tokens", [500, 1000, 3000], [0, 1000, 2000]),  # 100 per step, then 200
        ("time", [10, 20, 30], [0, 20, 25]),  # 50 tokens/s, then 200: the pause between is not counted
    ],
)
def test_curves_over_each_axis(tmp_path, axis: Axis, reported: list[float], scored: list[float]):
    """A report stands for the steps since the one before; a score between two reports lies between them."""
    view = viewed(
        tmp_path / "run",
        score(0, 4.0),
        report(5, 100, 50.0),
        report(10, 100, 50.0, 1.5),
        score(10, 3.0),
        {**report(20, 200, 200.0), "time": 9000.0},
        score(15, 2.5),
        score(16, None),
    )
    assert curve(view, "loss", axis, 100) == (reported, [2.0, 1.5, 2.0])
    assert curve(view, "validation loss", axis, 100) == (scored, [4.0, 3.0, 2.5])


def test_speeds_without_the_first_report_of_each_process(tmp_path):
    resumed = [{**START, "time": 200.0}, {"event": "resumed", "time": 201.0, "step": 2, "path": "checkpoint-2"}]
    later = [{**report(number, 64, speed), "time": 200.0 + number} for number, speed in ((3, 4.0), (4, 52.0))]
    view = viewed(tmp_path / "run", report(1, 64, 5.0), report(2, 64, 50.0), *resumed, *later)
    assert curve(view, "tokens/s", "steps", 100) == ([2, 4], [50.0, 52.0])
    alone = viewed(tmp_path / "alone", report(1, 64, 5.0))
    assert curve(alone, "tokens/s", "steps", 100) == ([1], [5.0])


def test_every_metric_of_a_run_without_steps_is_empty(tmp_path):
    view = viewed(tmp_path / "run")
    assert all(curve(view, metric, axis, 100) == ([], []) for metric in METRICS for axis in AXES)
    assert {row.name for row in results([view])} == {"state", "steps", "training time"}


def test_results_name_the_best(tmp_path):
    first = viewed(
        tmp_path / "a", report(1, 100, 50.0, 3.0), score(1, 2.0), score(2, 2.5), score(2, 0.5, "exact match")
    )
    second = viewed(tmp_path / "b", report(1, 100, 50.0, None), score(1, 1.5), score(1, 0.9, "exact match"))
    third = viewed(
        tmp_path / "c", report(1, 100, 70.0, 1.0), score(1, 0.7, "exact match"), score(3, 0.4, "exact match")
    )
    rows = {row.name: row for row in results([first, second, third])}
    assert rows["lowest validation loss"] == Row("lowest validation loss", ("2.0000", "1.5000", "–"), best=1)
    assert rows["  at step"].values == ("1", "1", "–")
    assert rows["exact match"] == Row("exact match", ("50.0%", "90.0%", "40.0%"), best=1)
    assert rows["tokens/s"] == Row("tokens/s", ("50", "50", "70"))
    assert rows["last loss"].values == ("3.0000", "–", "1.0000")
    assert all(row.best is None for row in results([first, first]))


def test_the_losses_are_those_of_the_list_and_of_the_finished_run(tmp_path):
    view = viewed(tmp_path / "run", *(report(number, 100, 50.0, 12.0 / number) for number in range(1, 31)))
    rows = {row.name: row.values[0] for row in results([view])}
    assert rows["last loss"] == "0.4000" and view.loss == 0.4
    assert rows["median of last losses"] == "0.4365" and "-> 0.4365" in str(view.loss_change)


def test_settings_that_differ(tmp_path):
    for name, rate, more in (
        ("a", "1e-5", ""),
        ("b", "0.00001", '[log]\nrun_name = "b"\n'),
        ("c", "2e-3", "[lora]\nr = 16\n"),
        ("d", "?", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(CONFIG.format(rate=rate) + more)
    runs = [tmp_path / name for name in "abcd"]
    assert differences(runs[:2]) == []
    found = differences(runs)
    assert [row for row in found if row.name in ("optim.learning_rate", "lora.r")] == [
        Row("optim.learning_rate", ("1e-05", "1e-05", "0.002", "")),
        Row("lora.r", ("–", "–", "16", "")),
    ]
    assert all(row.name.startswith("lora.") for row in found[1:]) and comparable(found)
    (tmp_path / "b" / "config.toml").write_text(CONFIG.format(rate="1e-5").replace("builtin:tasks", "chats.jsonl"))
    found = differences(runs[:2])
    assert found == [Row("data.train.0.path", ("builtin:tasks", "chats.jsonl"))] and not comparable(found)
    (tmp_path / "c" / "config.toml").write_text(CONFIG.format(rate="1e-5") + '[data]\ncache_dir = "tokens"\n')
    found = differences([tmp_path / "a", tmp_path / "c"])
    assert [row.name for row in found] == ["data.cache_dir"] and comparable(found)
