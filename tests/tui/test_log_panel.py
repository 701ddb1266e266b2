"""The newest of a log stays in sight, unless one scrolls away from it."""

import re

from rptrain.tui.log_panel import LogPanel

from .conftest import Page, driven, screen_text, until


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
