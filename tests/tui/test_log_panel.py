"""The newest lines of a log stay in sight until a person scrolls, and the panel comes to rest at any width."""

import re
from pathlib import Path

import pytest

from rptrain.tui.run.log_panel import LogPanel
from rptrain.tui.run.screen import RunScreen

from .conftest import Made, Page, driven, screen_text, settled, until
from .recorded import make_run


@driven
async def test_the_newest_stays_in_sight_until_one_scrolls():
    panel = LogPanel()
    app = Page(panel)
    async with app.run_test(size=(40, 10)) as pilot:

        def say(lines: int) -> None:
            panel.show_output("\n".join(f"line {number}" for number in range(lines)))

        async def seen(line: int) -> None:
            await until(pilot, lambda: re.search(rf"line {line}\b", screen_text(app)) is not None)

        async def laid_out(lines: int) -> None:
            await until(pilot, lambda: panel.query_one("#log-text").size.height == lines)

        panel.turn_to("output")
        for lines in (50, 300, 100, 1000):  # before any of them is laid out
            say(lines)
        await seen(999)
        await pilot.resize_terminal(40, 6)
        await seen(999)
        say(1100)
        await seen(1099)
        panel.to_end(False)
        await seen(0)
        say(1200)
        await laid_out(1200)
        await seen(0)
        panel.turn_to("samples")
        panel.turn_to("output")
        await seen(1199)
        panel.scroll(-3)
        await until(pilot, lambda: "line 1199" not in screen_text(app))
        say(1300)
        await laid_out(1300)
        await seen(1196)
        panel.to_end(True)
        await seen(1299)
        say(1301)
        await seen(1300)


@pytest.mark.parametrize("size", [(1, 1), (2, 60), (3, 60), (80, 24)])
@driven
async def test_the_layout_comes_to_rest_at_any_size(make: Made, tmp_path: Path, size: tuple[int, int]):
    run = make_run(tmp_path / "runs")
    async with make(attach=run).run_test(size=size) as pilot:
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen) and pilot.app.screen.state != "new")
        body = pilot.app.screen.query_one("#log-body")
        await settled(pilot)
        seen = set()
        for _ in range(10):
            await pilot.pause(0)
            seen.add((body.size, body.virtual_size, body.show_vertical_scrollbar))
        assert len(seen) == 1, seen


@driven
async def test_an_answer_of_several_lines_begins_below_its_prompt():
    panel = LogPanel()
    app = Page(panel)
    async with app.run_test(size=(60, 12)) as pilot:
        panel.show_samples(
            [{"step": 20, "prompt": "two\nlines", "text": "yes\nno\n"}, {"step": 20, "prompt": "b", "text": "c"}]
        )
        panel.turn_to("samples")
        await until(pilot, lambda: "step 20  b  c" in screen_text(app))
        shown = [line.strip() for line in screen_text(app).splitlines()]
        assert shown[(first := shown.index("step 20  two␊lines")) : first + 4] == [
            shown[first],
            "yes",
            "no",
            "step 20  b  c",
        ]
