"""The curves of Run: over steps and time, smoothed, with validation losses, and the values at a cursor."""

import json
from pathlib import Path

import pytest

from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.usage import progress_of
from rptrain.tui.run.curves import KINDS, Curves
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.widgets.plot import Curve, Plot

from ..runs.test_view import START, process, write
from .conftest import Made, Page, driven, press_until, screen_text, settled, until, widget_text
from .recorded import BEGAN, make_run, snapshot


def title(plot: Plot) -> str:
    return widget_text(plot).splitlines()[0]


@driven
async def test_the_values_at_the_cursor():
    plot = Plot("loss", id="loss")
    async with Page(plot).run_test(size=(60, 12)) as pilot:
        await pilot.pause()
        plot.show((Curve([10, 20], [5.0, 4.0], "red", "validation"), Curve(range(1, 21), range(1, 21), "blue")), "now")
        assert "now  ━ validation" in title(plot)
        plot.move(-1)
        assert "at 20:  20  validation 4" in title(plot)
        plot.move(-1000)
        assert "at 1:  1  validation 5" in title(plot)
        assert all(line[8] != " " for line in widget_text(plot).splitlines()[1:-1])
        plot.move(26)
        assert "at 11:  11  validation 5" in title(plot)
        plot.show(())
        assert title(plot).strip() == "loss"


@driven
async def test_the_newest_value_changes_without_the_curves():
    plot = Plot("loss", id="loss")
    async with Page(plot).run_test(size=(60, 12)) as pilot:
        await pilot.pause()
        plot.show((Curve([10, 20], [5.0, 4.0], "red"),), "4.1")
        before = widget_text(plot).splitlines()
        plot.tell("3.9", "a hint")
        title, *curves = widget_text(plot).splitlines()
        assert title.split() == ["loss", "3.9", "a", "hint"] and curves == before[1:]


@driven
async def test_values_at_other_places_and_axes_that_hardly_vary():
    plot = Plot("memory", id="loss")
    async with Page(plot).run_test(size=(60, 12)) as pilot:
        await pilot.pause()
        plot.show((Curve([10, 20], [5.0, 4.0], "red", "validation"), Curve(range(1, 21), [7.0] * 20, "blue")))
        plot.move(0)
        plot.move(-100)
        assert "at 1:  7  validation 5 (at 10)" in title(plot)
        plot.cursor, plot.least_range = None, 0.5
        plot.show((Curve([1, 2], [100.0, 101.0], "blue"),))
        rows = widget_text(plot).splitlines()
        assert rows[1].split("│")[0].strip() == "126" and rows[-2].split("│")[0].strip() == "75.2"
        plot.bounds, plot.format_y = (0.0, 1.0), "{:.0%}".format
        plot.show((Curve([1, 2], [0.5, 0.5], "blue"),))
        rows = widget_text(plot).splitlines()
        assert rows[1].startswith("   100%│") and rows[-2].startswith("     0%│")
        plot.bounds, plot.least_range = None, 0.0
        plot.show((Curve([1, 2], [0.771, 0.772], "blue"),))
        assert widget_text(plot).count("77%") == 1, "equal labels"


@pytest.mark.parametrize(("width", "names"), [(60, ["A careful", "B bold-long"]), (30, ["A", "B"])])
@driven
async def test_curves_have_letters_that_need_no_color(width: int, names: list[str]):
    plot = Plot("loss by steps")
    async with Page(plot).run_test(size=(width, 12)) as pilot:
        await pilot.pause()
        runs = [("A", "careful", [9.0, 8.0]), ("B", "bold-long", [3.0, 2.0])]
        plot.show(tuple(Curve([1, 10], ys, "red", name, mark=mark) for mark, name, ys in runs))
        assert title(plot).rstrip().split("  ")[-2:] == names
        rows = widget_text(plot).splitlines()[1:]
        upper, lower = "".join(rows[:4]), "".join(rows[4:])
        assert (upper.count("A"), upper.count("B"), lower.count("A"), lower.count("B")) == (3, 0, 0, 3)


@driven
async def test_a_spike_does_not_set_the_axis():
    plot = Plot("tokens/s", id="loss")
    async with Page(plot).run_test(size=(60, 12)) as pilot:
        await pilot.pause()
        plot.spikes = 3.0
        plot.show((Curve([1, 2, 3, 4], [100.0, 1e6, 120.0, 110.0], "blue"),))
        rows = widget_text(plot).splitlines()
        assert rows[1].split("│")[0].strip() == "120" and rows[1].split("│")[1].strip(), "it is drawn at the end"


@driven
async def test_the_first_minute_of_a_resumed_run_does_not_set_the_axis_of_the_speed(tmp_path: Path):
    for began, speeds in ((0.0, (1000.0, 1010.0)), (500.0, (20.0, 990.0))):
        write(tmp_path, START | {"time": began}, process(time=began + 1))
        for minute, speed in enumerate(speeds, 1):
            shots = [snapshot(("cuda:0",), began + 60.0 * minute, 3)]
            write(
                tmp_path, vars(progress_of(shots, 5)) | {"event": "progress", "power": [], "tokens_per_second": speed}
            )
    speed = next(kind for kind in KINDS if kind.id == "speed")
    curves = tuple(speed.read(RunView(tmp_path)))
    plot = Plot("tokens/s", id="loss")
    async with Page(plot).run_test(size=(60, 12)) as pilot:
        await pilot.pause()
        plot.show(curves)
        rows = widget_text(plot).splitlines()
        assert [row.split("│")[0].strip() for row in (rows[1], rows[-2])] == ["1010", "990"]
        assert min(curves[0].ys) == 20.0 and rows[-2].split("│")[1].strip(), "it is drawn at the end"


@driven
async def test_the_title_says_that_the_scale_is_logarithmic():
    plot = Plot("loss", logarithmic=True, id="loss")
    async with Page(plot).run_test(size=(60, 12)) as pilot:
        await pilot.pause()
        plot.show((Curve([1, 2, 3], [300.0, 30.0, 2.0], "blue"),))
        assert title(plot).startswith("loss, log scale")
        assert widget_text(plot).splitlines()[1].split("│")[0].strip() == "300"
        plot.note = "smoothed"
        plot.show((Curve([1, 2, 3], [300.0, 30.0, 2.0], "blue"),), "2.0")
        assert title(plot).startswith("loss, smoothed, log scale  2.0")
        plot.show((Curve([1, 2, 3], [3.0, 2.5, 2.0], "blue"),))
        assert "log scale" not in title(plot)


@pytest.mark.long
@driven
async def test_curves_are_chosen_smoothed_and_read(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=200)
    with (run / "events.jsonl").open("a") as file:
        for step, loss in ((100, 2.125), (200, 1.875)):
            record = {"schema": 1, "event": "evaluation", "time": BEGAN + 500, "step": step, "name": "loss"}
            file.write(json.dumps(record | {"score": loss, "tasks": {}}) + "\n")
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app, screen = pilot.app, pilot.app.screen
        await until(pilot, lambda: "━ validation" in screen_text(app))
        await pilot.press("left")  # no curve is large
        curves = screen.query_one(Curves)
        await press_until(pilot, "l", lambda: curves.chosen is not None and curves.chosen.id == "loss")
        await press_until(pilot, "escape", lambda: curves.chosen is None)
        assert pilot.app.screen is screen, "the first esc leaves the large curve alone"
        await press_until(pilot, "l", lambda: curves.chosen is not None and curves.chosen.id == "loss")
        await settled(pilot)
        plot = screen.query_one("#loss", Plot)
        rough = plot.curves[-1]
        await press_until(pilot, "right", lambda: "at 200:" in title(plot) and "validation 1.8750" in title(plot))
        await press_until(pilot, "shift+left", lambda: "at 200:" not in title(plot))
        await press_until(pilot, "m", lambda: len(plot.curves) == 3)
        raw, _, smooth = plot.curves
        assert "loss, smoothed" in title(plot)
        assert raw.ys == rough.ys and max(smooth.ys) < max(raw.ys) and smooth.xs[-1] == 200
        await press_until(pilot, "m", lambda: len(plot.curves) == 2)
        await pilot.click("#loss", offset=(9, 3))
        await until(pilot, lambda: "at 1:" in title(plot))


@pytest.mark.long
@driven
async def test_curves_over_time_cover_days(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=5)
    with (run / "events.jsonl").open("a") as file:
        for hour in range(1, 50):
            progress = progress_of([snapshot(("cuda:0", "cuda:1"), BEGAN + 3600 * hour, 3)], 5)
            line = {"event": "progress", **vars(progress), "power": [200.0, 250.0], "tokens_per_second": 1000.0 + hour}
            file.write(json.dumps({"schema": 1, **line}) + "\n")
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        app = pilot.app
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "validation" not in screen_text(app))
        await settled(pilot)
        for name, value in (
            ("speed", "1,049"),
            ("busy", "96%"),
            ("vram", "18.2 GiB"),
            ("host", "118 GiB"),
            ("power", "450 W"),
        ):
            for _ in range(12):  # more than there are curves
                if (chosen := app.screen.query_one(Curves).chosen) is not None and chosen.id == name:
                    break
                await pilot.press("l")
                await settled(pilot)
            assert chosen is not None and chosen.id == name
            plot = app.screen.query_one(f"#{name}", Plot)
            assert value in title(plot)
            last = widget_text(plot).splitlines()[-1]
            assert "1 h 00 m" in last and "2 d 01 h" in last
