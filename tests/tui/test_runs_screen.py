"""Runs: the list, and what is done with a run of it."""

import asyncio
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList

from rptrain.tui.screens.new_run import NewRun
from rptrain.tui.screens.run import RunScreen
from rptrain.tui.screens.runs import Runs
from rptrain.tui.services import launch
from rptrain.tui.services.summaries import RunFolder
from rptrain.tui.widgets.plot import Plot

from .conftest import Made, driven, press_until, screen_text, settled, until
from .recorded import BEGAN, make_run

pytestmark = pytest.mark.long


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The newest first: one that goes on, one that failed, one that finished."""
    folder = tmp_path / "runs"
    make_run(folder, "now", steps=40)
    make_run(folder, "broken", steps=30, end="failed", alive=False, began=BEGAN - 1e5)
    make_run(folder, "done", steps=50, total=50, end="finished", alive=False, began=BEGAN - 2e5)
    return folder


async def listed(pilot) -> None:
    await pilot.press("f3")
    await until(pilot, lambda: "▶ training" in screen_text(pilot.app))


@driven
async def test_the_list(make: Made, runs: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        rows = screen_text(pilot.app).splitlines()[2:5]
        assert [row.split()[0] for row in rows] == ["now", "broken", "done"]
        assert "✗ failed" in rows[1] and "✓ finished" in rows[2] and "50/50" in rows[2]
        make_run(runs, "newer", steps=3, began=BEGAN + 10)  # listed last until its first record is there
        await until(pilot, lambda: screen_text(pilot.app).splitlines()[2].split()[0] == "newer")
        chosen = pilot.app.screen.query_one(OptionList).highlighted
        assert chosen == 1  # "now" is still the chosen one


@driven
async def test_the_columns_are_those_that_there_is_room_for(make: Made, tmp_path: Path):
    make_run(tmp_path / "runs", "done", steps=50, end="finished", alive=False, began=BEGAN - 2e5)
    async with make().run_test(size=(160, 30)) as pilot:
        await pilot.press("f3")
        for width in (160, 80, 160):
            await pilot.resize_terminal(width, 30)
            await until(pilot, lambda width=width: ("llama-3.1-8b" in screen_text(pilot.app)) is (width == 160))
            heading, row = screen_text(pilot.app).splitlines()[1:3]
            assert ("model" in heading) is (width == 160) and heading.index("took") == row.index("2 m 21 s")


@driven
async def test_enter_opens_and_escape_comes_back(make: Made, runs: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("j", "enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        assert isinstance(pilot.app.screen, RunScreen) and pilot.app.screen.path.name == "broken"
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, RunScreen))
        await pilot.click(OptionList, offset=(5, 2))
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        assert isinstance(pilot.app.screen, RunScreen) and pilot.app.screen.path.name == "done"


@driven
async def test_the_list_rests_behind_a_run_and_is_new_when_one_comes_back(make: Made, runs: Path, monkeypatch):
    monkeypatch.setattr("rptrain.tui.screens.runs.PAUSE", 0.05)
    looks: list[None] = []
    look = RunFolder.look
    monkeypatch.setattr(RunFolder, "look", lambda folder: looks.append(None) or look(folder))
    async with make().run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        behind = pilot.app.screen
        assert isinstance(behind, Runs)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        make_run(runs, "newer", steps=3, began=BEGAN + 10)
        await until(pilot, lambda: not behind._in_sight.is_set())
        count = len(looks)
        await asyncio.sleep(0.5)
        assert len(looks) <= count + 1, "one for which the wait was over already, and none of the ten that would follow"
        await pilot.press("escape")
        await until(pilot, lambda: "newer" in screen_text(pilot.app))


@driven
async def test_losses_are_compared(make: Made, runs: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await listed(pilot)
        await pilot.press("space", "down", "down", "c")
        plot = pilot.app.screen.query_one(Plot)
        await until(pilot, lambda: len(plot.curves) == 2)
        await settled(pilot)
        assert [curve.name for curve in plot.curves] == ["now", "done"]
        assert plot.curves[0].style != plot.curves[1].style and plot.curves[1].xs[-1] == 50
        assert "━ now" in screen_text(pilot.app)
        await pilot.press("space", "up", "up", "space")
        await until(pilot, lambda: not pilot.app.screen.query_one("#compared").display)


@driven
async def test_deleting_is_asked_twice_and_never_of_a_run_that_goes_on(make: Made, runs: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("d")
        await settled(pilot)
        assert "Delete" not in screen_text(pilot.app)
        await pilot.press("down", "d")
        await until(pilot, lambda: "Delete broken?" in screen_text(pilot.app))
        await press_until(pilot, "enter", lambda: "Delete" not in screen_text(pilot.app))
        assert (runs / "broken").exists()
        await pilot.press("d")
        await until(pilot, lambda: "Delete broken?" in screen_text(pilot.app))
        await pilot.press("y")
        await until(pilot, lambda: not (runs / "broken").exists())
        await until(pilot, lambda: "broken" not in screen_text(pilot.app))
        assert (runs / "done").exists() and (runs / "now").exists()


@driven
async def test_resume_export_and_a_new_run_from_one(make: Made, runs: Path, monkeypatch):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", 'echo "$@" > said', "trainer"))
    monkeypatch.setattr(launch, "EXPORT", ("sh", "-c", 'echo "$@" > exported', "export"))
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        await listed(pilot)
        await pilot.press("r")
        await settled(pilot)
        assert not Path("said").exists()  # it goes on
        await pilot.press("down", "e")
        await until(pilot, lambda: "Export broken" in screen_text(pilot.app))
        await until(pilot, lambda: isinstance(pilot.app.focused, Input))
        await press_until(pilot, "enter", Path("exported").exists)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await until(pilot, lambda: Path("said").exists() and "save.resume" in Path("said").read_text())
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, RunScreen))
        await pilot.press("n")
        await until(pilot, lambda: isinstance(pilot.app.screen, NewRun))
        await until(pilot, lambda: "llama-3.1-8b" in screen_text(pilot.app))


@driven
async def test_a_folder_without_runs_says_so(make: Made):
    async with make().run_test(size=(80, 24)) as pilot:
        await pilot.press("f3")
        await until(pilot, lambda: "No run in runs yet" in screen_text(pilot.app))
        await pilot.press("space", "r", "e", "d", "n", "enter")
        assert "No run in runs yet" in await settled(pilot)
