"""Runs: the list, and what is done with a run of it."""

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest
from textual.containers import ScrollableContainer
from textual.events import Key
from textual.widgets import Input, OptionList

from rptrain.runs.folder import listing
from rptrain.runs.folder.listing import Listing
from rptrain.tui.messages import OpenRun
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.runs.run_list import Heading, RunList
from rptrain.tui.runs.run_rows import Layout
from rptrain.tui.runs.screen import Runs
from rptrain.tui.runs.summaries import RunFolder
from rptrain.tui.services import launch
from rptrain.tui.widgets.plot import Plot

from ..run_tools import PATIENCE
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


def names(app) -> list[str]:
    return [run.path.name for run in app.screen.query_one(RunList)._shown]


def heading(app) -> str:
    return next(line for line in screen_text(app).splitlines() if "state" in line and "steps" in line)


@driven
async def test_sorting_by_keys_and_by_mouse(make: Made, runs: Path):
    async with make().run_test(size=(120, 24)) as pilot:
        app = pilot.app
        await listed(pilot)
        assert "began ▼" in heading(app) and names(app) == ["now", "broken", "done"]
        await pilot.press("down", "s", "s")  # model, run
        await until(pilot, lambda: "run ▲" in heading(app))
        assert names(app) == ["broken", "done", "now"]
        assert app.screen.query_one(RunList).chosen.path.name == "broken"
        await press_until(pilot, "S", lambda: names(app) == ["now", "done", "broken"])
        await pilot.press("s", "s")
        await until(pilot, lambda: "steps ▼" in heading(app))
        assert names(app) == ["done", "now", "broken"]
        for arrow, order in (("▼", ["done", "now", "broken"]), ("▲", ["broken", "now", "done"])):
            await pilot.click(Heading, offset=(heading(app).index("took") + 1, 0))
            await until(pilot, lambda arrow=arrow: f"took {arrow}" in heading(app))
            assert [name for name in names(app) if name != "now"] == [name for name in order if name != "now"]
        await pilot.resize_terminal(60, 24)
        await until(pilot, lambda: "run · took ▲" in heading(app))
        columns = set[str]()
        for _ in range(12):  # more than there are columns
            app.screen.query_one(RunList).sort_by_next()
            columns.add(app.screen.query_one(RunList).order.column)
        assert {"run", "steps", "began"} <= columns and "took" not in columns, "those in sight, and the start"


@driven
async def test_filtering_by_name_state_and_model(make: Made, runs: Path):
    make_run(runs, "qwen", steps=20, end="finished", alive=False, began=BEGAN - 3e5, model="qwen3-8b")
    async with make().run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await listed(pilot)
        await pilot.press("slash", *"finished")
        await until(pilot, lambda: names(app) == ["done", "qwen"] and "2 of 4 runs" in screen_text(app))
        await pilot.press("space", *"llama")
        await until(pilot, lambda: names(app) == ["done"])
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        assert app.screen.path.name == "done"
        await press_until(pilot, "escape", lambda: isinstance(app.screen, Runs))
        assert names(app) == ["done"] and "finished llama" in screen_text(app)
        await press_until(pilot, "escape", lambda: len(names(app)) == 4)
        await pilot.press("slash", *"no such")
        await until(pilot, lambda: "No run has these words" in screen_text(app))
        await pilot.press("down", "space", "r", "e", "d", "n", "enter")
        await press_until(pilot, "escape", lambda: len(names(app)) == 4)
        assert isinstance(app.screen, Runs)


@driven
async def test_only_rows_that_changed_are_made_again(make: Made, runs: Path, monkeypatch):
    made: list[int] = []
    replace = RunList.replace_option_prompt_at_index
    monkeypatch.setattr(
        RunList, "replace_option_prompt_at_index", lambda self, at, row: made.append(at) or replace(self, at, row)
    )
    async with make().run_test(size=(120, 24)) as pilot:
        await listed(pilot)
        made.clear()
        with (runs / "now" / "events.jsonl").open("a") as file:
            file.write((runs / "done" / "events.jsonl").read_text().splitlines()[-2].replace("\n", "") + "\n")
        await until(pilot, lambda: "50/1,000" in screen_text(pilot.app))
        assert set(made) == {0}


@driven
async def test_the_cursor_stands_on_a_run_that_was_just_opened(make: Made, runs: Path):
    async with make().run_test(size=(100, 30)) as pilot:
        await listed(pilot)
        shown = pilot.app.screen.query_one(RunList)
        assert shown.chosen is not None
        began = make_run(runs, "late", steps=3, began=BEGAN + 10**6)
        assert shown.chosen.path.name == "now"
        pilot.app.post_message(OpenRun(began))
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
        await until(pilot, lambda: shown.chosen is not None and shown.chosen.path.name == "late")


def test_names_have_room_before_the_last_columns():
    for width, longest, name in ((60, 40, 24), (80, 12, 22), (80, 30, 33), (120, 30, 32), (200, 70, 62)):
        layout = Layout.of(width, longest)
        assert layout.name >= min(longest + 1, name), (width, layout)
        assert {"state", "steps", "loss"} <= dict(layout.columns).keys()


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
    monkeypatch.setattr("rptrain.tui.runs.screen.PAUSE", 0.05)
    looks: list[None] = []
    read = RunFolder.read
    monkeypatch.setattr(RunFolder, "read", lambda *given: looks.append(None) or read(*given))
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
async def test_a_list_that_is_read_says_so_and_fills(make: Made, runs: Path, monkeypatch):
    """Keys that come before the first runs are read act on those; later ones act while the others are read."""
    gates = {name: threading.Event() for name in ("now", "done")}
    read = Listing._read

    def slowly(listing, run, known):
        if threading.current_thread().name.startswith("runs"):  # of the screen
            assert run.name not in gates or gates[run.name].wait(PATIENCE)
        return read(listing, run, known)

    monkeypatch.setattr(Listing, "_read", slowly)
    monkeypatch.setattr(listing, "AT_ONCE", 2)
    monkeypatch.setattr(listing, "PERIOD", 0.0)
    for place, name in enumerate(("now", "broken", "done")):
        os.utime(runs / name / "config.toml", (BEGAN - place, BEGAN - place))
    async with make().run_test(size=(80, 24)) as pilot:
        app = pilot.app
        app.post_message(Key("f3", None))
        await until(pilot, lambda: isinstance(app.screen, Runs) and "reading …" in screen_text(app))
        for key in ("down", "enter"):
            app.post_message(Key(key, None))
        await pilot.pause()
        gates["now"].set()
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        assert app.screen.path.name == "broken"
        await press_until(pilot, "escape", lambda: isinstance(app.screen, Runs))
        assert names(app) == ["now", "broken"] and "reading runs: 2 of 3" in screen_text(app)
        await press_until(pilot, "up", lambda: app.screen.query_one(RunList).chosen.path.name == "now")
        gates["done"].set()
        await until(pilot, lambda: names(app) == ["now", "broken", "done"] and "reading" not in screen_text(app))
        assert app.screen.query_one(RunList).chosen.path.name == "now"


@driven
async def test_the_list_does_not_wrap(make: Made, runs: Path):
    async with make().run_test(size=(120, 36)) as pilot:
        await listed(pilot)
        chosen = pilot.app.screen.query_one(RunList)
        for key, place in (("up", 0), ("k", 0), ("down", 1), ("down", 2), ("down", 2), ("j", 2), ("up", 1)):
            await pilot.press(key)
            assert chosen.highlighted == place


@driven
async def test_runs_are_compared(make: Made, runs: Path):
    config = runs / "done" / "config.toml"
    config.write_text(config.read_text() + "[optim]\nlearning_rate = 3e-4\n")
    async with make().run_test(size=(120, 36)) as pilot:
        app = pilot.app
        await listed(pilot)
        await pilot.press("down", "down", "space", "up", "up", "space")
        plot = app.screen.query_one(Plot)
        await until(pilot, lambda: len(plot.curves) == 2)
        await settled(pilot)
        assert [(curve.name, curve.mark) for curve in plot.curves] == [("now", "A"), ("done", "B")], "as in the list"
        assert plot.curves[0].style != plot.curves[1].style and plot.curves[1].xs[-1] == 50
        row = next(line for line in screen_text(app).splitlines() if "optim.learning_rate" in line)
        assert row.split()[-2:] == ["1e-05", "0.0003"]
        await pilot.press("m", "m", "x")
        await until(pilot, lambda: "gradient norm by tokens" in screen_text(app))
        await until(pilot, lambda: plot.curves[1].xs[-1] == 50 * 131072 and "6.6 M" in screen_text(app))
        await pilot.press("space", "down", "down", "space")
        await until(pilot, lambda: not app.screen.query_one("#compared").display)


@driven
async def test_a_wide_screen_has_the_whole_table_alone_or_with_the_curves(make: Made, runs: Path):
    """Of three runs the table takes more than the half, and each lowest validation loss has its mark in sight."""
    for name, loss in (("now", 1.25), ("broken", 1.1335), ("done", 1.5)):
        score = {"event": "evaluation", "time": BEGAN, "step": 20, "name": "loss", "score": loss}
        with (runs / name / "events.jsonl").open("a") as file:
            file.write(json.dumps(score) + "\n")
        config = runs / name / "config.toml"
        config.write_text(config.read_text() + f'[data]\ncache_dir = "/data/{name * 8}"\n')
    async with make().run_test(size=(200, 50)) as pilot:
        app = pilot.app
        await listed(pilot)
        await pilot.press("space", "down", "space", "down", "space")
        await until(pilot, lambda: "1.1335 ✓ best" in screen_text(app) and "loss by steps" in screen_text(app))
        row = next(line for line in (await settled(pilot)).splitlines() if "lowest validation loss" in line)
        assert row.index("1.2500") < row.index("1.1335 ✓ best") < row.index("1.5000")
        await press_until(pilot, "t", lambda: "loss by steps" not in screen_text(app))
        assert "1.1335 ✓ best" in await settled(pilot)
        await press_until(pilot, "t", lambda: "loss by steps" in screen_text(app))


@driven
async def test_the_highlight_stays_where_a_key_put_it(make: Made, runs: Path):
    """A run that was to be highlighted may appear in the list later; one of the same name elsewhere is not it."""
    async with make().run_test(size=(120, 36)) as pilot:
        await listed(pilot)
        found = pilot.app.screen.query_one(RunList)
        names = lambda: (found.chosen.path.name if found.chosen else "", found.counts[0])  # noqa: E731
        found.choose(Path("elsewhere/done"))
        await settled(pilot)
        assert names() == ("now", 3)
        found.choose(runs / "later")
        make_run(runs, "later", steps=3, began=BEGAN - 3e5)
        await until(pilot, lambda: names() == ("later", 4))
        found.choose(runs / "last")
        await press_until(pilot, "up", lambda: names() == ("done", 4))
        make_run(runs, "last", steps=3, began=BEGAN - 4e5)
        await until(pilot, lambda: names() == ("done", 5))


@driven
async def test_keys_that_do_not_fit_are_hidden_whole(make: Made, runs: Path):
    async with make().run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await press_until(pilot, "down", lambda: "r resume" in screen_text(pilot.app))
        for width, sort in ((80, False), (100, True), (80, False), (120, True)):
            await pilot.resize_terminal(width, 24)
            line = (await settled(pilot)).splitlines()[-1]
            assert line.endswith("▏F1 keys") and ("s sort" in line) == sort and "c chat" in line
            shown = line.removesuffix("▏F1 keys").split("  ")
            assert all(len(key.split()) == 2 for key in shown if key.strip()), "no key is cut"


@driven
async def test_a_narrow_screen_has_the_curves_or_the_table(make: Made, runs: Path):
    async with make().run_test(size=(60, 24)) as pilot:
        app = pilot.app
        await listed(pilot)
        await pilot.press("t", "m")  # nothing to compare yet
        await pilot.press("space", "down", "space")
        await until(pilot, lambda: "loss by steps" in screen_text(app) and "results" not in screen_text(app))
        await pilot.press("t")
        await until(pilot, lambda: "results" in screen_text(app) and "loss by steps" not in screen_text(app))
        await press_until(pilot, "tab", lambda: isinstance(app.focused, ScrollableContainer))
        await press_until(
            pilot, "end", lambda: "train.max_steps" in screen_text(app) or "no settings" in screen_text(app)
        )
        await press_until(pilot, "t", lambda: "loss by steps" in screen_text(app))
        await press_until(pilot, "t", lambda: "loss by steps" not in screen_text(app))
        await press_until(pilot, "m", lambda: "validation loss by steps" in screen_text(app))  # not behind the table


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
        await press_until(pilot, "escape", lambda: isinstance(pilot.app.screen, Runs))
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
