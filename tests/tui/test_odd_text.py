"""Names and records may hold anything: no screen gives a terminal something to obey, and nothing is drawn over."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from rptrain.tui.new_run import places, planning
from rptrain.tui.new_run.places import FoundModel
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.runs.run_list import RunList
from rptrain.tui.runs.screen import Runs
from rptrain.tui.widgets.plot import Plot
from rptrain.utils.errors import UserError

from .conftest import Made, Scripted, driven, focus, planned, screen_text, until
from .recorded import make_run

pytestmark = pytest.mark.long

NAME = "a\x1b[2J\tb\nc\x07\x9b\u202e" + os.fsdecode(b"\xff")
SHOWN = "a␛[2J␉b␊c␇���"


async def check(pilot: Pilot[Any], *shown: str) -> None:
    await until(pilot, lambda: all(part in screen_text(pilot.app) for part in shown))
    lines = screen_text(pilot.app).split("\n")
    assert len(lines) == pilot.app.size.height and all(line.isprintable() for line in lines)


@driven
async def test_no_run_s_name_is_obeyed(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", end="stopped", alive=False, model="m").rename(tmp_path / "runs" / NAME)
    told = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(told.replace('"model":"m"', f'"model":{json.dumps(f"{NAME}model")}'))
    with (run / "events.jsonl").open("a") as file:
        score = {"event": "evaluation", "time": 1.7e9 + 899, "step": 400, "name": f"{NAME}score", "score": 0.5}
        file.write(json.dumps(score) + "\n")
        file.write(json.dumps({"event": "failed", "time": 1.7e9 + 900, "message": f"{NAME}failed"}) + "\n")
    async with make().run_test(size=(160, 30), notifications=True) as pilot:
        await pilot.press("f3")
        await check(pilot, f"  {SHOWN} ", f"{SHOWN}model")
        await pilot.press("space")
        await check(pilot, f"A {SHOWN}", f"{SHOWN}score ")
        for key, asked in (("d", f"Delete {SHOWN}?"), ("e", f"Export {SHOWN}")):
            await pilot.press(key)
            await check(pilot, asked, f"runs/{SHOWN}")
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(pilot.app.screen, Runs))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await check(pilot, f" {SHOWN}  ✗ failed", f"runs/{SHOWN}")


@driven
async def test_no_path_and_no_value_of_a_config_is_obeyed(make: Made, helper: Scripted, tmp_path: Path):
    name = NAME[:-1]  # which a config can hold
    (tmp_path / "rptrain.toml").write_text(f"[model]\npath = {json.dumps(name)}\n[[data.train]]\npath = 'x'\n")
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "x.jsonl").write_text("{}\n")
    (tmp_path / f"z{name}.jsonl").write_text("{}\n")  # which does not complete the model's path
    helper.answers[places.models] = [FoundModel(name, "here", 0, f"{NAME}about", False)]
    helper.answers[planning.plan] = UserError(f"no model {name}")
    async with make().run_test(size=(120, 36)) as pilot:
        await check(pilot, "no model a␛[2J", "  a␛[2J    b␊c��  ")
        model = await focus(pilot, "#model-path")
        assert isinstance(model, Input)
        await pilot.press("enter")
        await check(pilot, f"{SHOWN}about")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(pilot.app.screen, NewRun))
        await focus(pilot, "#data-train-0-path")
        await pilot.press("enter")
        await check(pilot, f"z{SHOWN[:-1]}.jsonl")
        assert pilot.app.screen.query_one(OptionList).option_count == 3  # none in the folder whose name is no text
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(pilot.app.screen, NewRun))
        assert model.value == name
        helper.answers[planning.plan] = planned()
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "*" not in screen_text(pilot.app).splitlines()[0])


@driven
async def test_names_of_compared_runs_share_the_line(make: Made, tmp_path: Path):
    for name in ("one", "two", "three"):
        make_run(tmp_path / "runs", name + "-long" * 20, steps=5)
    async with make().run_test(size=(80, 24)) as pilot:
        await pilot.press("f3")
        await until(pilot, lambda: "three-long" in screen_text(pilot.app))
        for marked, key in enumerate(("space", "j", "space", "j", "space")):
            await pilot.press(key)
            await until(pilot, lambda marked=marked: len(pilot.app.screen.query_one(Plot).curves) == (marked + 2) // 2)
        await until(pilot, lambda: len(pilot.app.screen.query_one(Plot).curves) == 3)
        shown = [
            f"{mark} {run.name[:8]}"
            for mark, run in zip("ABC", pilot.app.screen.query_one(RunList).marked, strict=True)
        ]
        await until(pilot, lambda: all(screen_text(pilot.app).count(name) == 2 for name in shown))
        (line,) = (line for line in screen_text(pilot.app).splitlines() if line.strip().startswith("loss"))
        assert all(name in line for name in shown)
