"""The search of the log, and dates where it covers days."""

from pathlib import Path

import pytest

from rptrain.runs.view.values import LogLine
from rptrain.tui.run.log_panel import LogPanel
from rptrain.tui.run.screen import RunScreen

from .conftest import Made, Page, driven, press_until, screen_text, settled, until
from .recorded import BEGAN, make_run


@driven
async def test_dates_are_shown_if_the_log_covers_days():
    panel = LogPanel()
    app = Page(panel)
    async with app.run_test(size=(60, 10)) as pilot:
        panel.show_log([LogLine(BEGAN, "one"), LogLine(BEGAN + 60, "two")])
        await until(pilot, lambda: "two" in screen_text(app))
        assert "11-1" not in screen_text(app)
        panel.show_log([LogLine(BEGAN, "one"), LogLine(BEGAN + 3 * 86400, "three")])
        await until(pilot, lambda: "three" in screen_text(app))
        assert screen_text(app).count("11-1") == 2


@driven
async def test_what_was_searched_for_is_highlighted():
    panel = LogPanel()
    app = Page(panel)
    async with app.run_test(size=(60, 10)) as pilot:
        panel.show_log([LogLine(BEGAN, "the plan"), LogLine(BEGAN, "a Plan of PLANS")])
        panel.search()
        await pilot.press(*"plan")
        await until(pilot, lambda: "2 of 2 lines have" in screen_text(app))
        segments = [segment for line in app.screen._compositor.render_strips() for segment in line]
        marked = [segment.text for segment in segments if segment.style and segment.style.reverse]
        assert [text for text in marked if text.strip()] == ["plan", "Plan"], "the first place in each line"


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [(60, 24), (80, 24), (200, 50)])
@driven
async def test_the_log_is_searched_by_a_key(make: Made, tmp_path: Path, size: tuple[int, int]):
    run = make_run(tmp_path / "runs", steps=1000)
    (run / "trainer.log").write_text("a line\nanother SAVED one\n")
    async with make(attach=run).run_test(size=size) as pilot:
        app = pilot.app
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "step 1000: saved" in screen_text(app))
        await settled(pilot)
        await press_until(pilot, "/", lambda: app.focused is not None and app.focused.id == "log-search")
        await pilot.press(*"PLAN")  # the letters are not keys now
        await until(pilot, lambda: "1 of 8 lines have “plan”" in screen_text(app))
        assert "plan: F0-7" in screen_text(app) and "step 1000: saved" not in screen_text(app)
        await press_until(pilot, "enter", lambda: app.focused is not None and app.focused.id == "log-body")
        await press_until(pilot, "o", lambda: "0 of 3 lines have" in screen_text(app))
        panel = app.screen.query_one(LogPanel)
        await press_until(pilot, "escape", lambda: "another SAVED one" in screen_text(app))
        assert panel.part == "output" and isinstance(app.screen, RunScreen)
        await press_until(pilot, "escape", lambda: not isinstance(app.screen, RunScreen))
