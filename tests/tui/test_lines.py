"""Lines of text are drawn again where they changed, and only there."""

from collections.abc import Iterator
from math import inf, nan

from textual.content import Content
from textual.strip import Strip
from textual.visual import Visual

from rptrain.tui.widgets.line_widget import LineWidget
from rptrain.tui.widgets.plot import Curve, Plot

from .conftest import Page, driven, screen_text, settled, widget_text


class Poem(LineWidget):
    DEFAULT_CSS = "Poem { height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self.rows = [("one", "red"), ("two", "red"), ("three", "red")]
        self.drawn: list[int] = []

    def lines(self) -> Iterator[Content]:
        for text, style in self.rows:
            yield Content.styled(text, style)

    def render_line(self, y: int) -> Strip:
        self.drawn.append(y)
        return super().render_line(y)


@driven
async def test_what_changed_is_drawn_again_and_nothing_else():
    poem = Poem()
    app = Page(poem)
    async with app.run_test(size=(20, 4)) as pilot:
        await pilot.pause()

        async def drawn() -> list[int]:
            await settled(pilot)
            poem.drawn.clear()
            poem.redraw()
            await settled(pilot)
            return poem.drawn

        assert await drawn() == []
        poem.rows[1] = ("two", "green")  # the color alone
        assert await drawn() == [1]
        poem.rows[0] = ("uno", "red")
        del poem.rows[2]
        assert sorted(await drawn()) == [0, 2]
        assert screen_text(app).split() == ["uno", "two"]
        poem.rows.append(("four that is longer than the line", "red"))
        assert await drawn() == [2]
        assert screen_text(app).splitlines()[2:] == ["four that is longer"]
        poem.rows[0] = ("a\x1b[2J\tb\n", "red")
        assert await drawn() == [0]
        assert screen_text(app).splitlines()[0] == "a␛[2J␉b␊"


@driven
async def test_a_line_has_the_styles_that_textual_gives_it_in_each_theme():
    poem = Poem()
    app = Page(poem)
    lines = [Content.assemble(("one", "bold $primary"), " two ", ("三", "$error"), "four"), Content("five six seven")]

    def expected(line: Content) -> Strip:
        return Visual.to_strips(poem, line, poem.size.width, 1, poem.visual_style)[0]

    def styles(strip: Strip) -> list[tuple[str, object, object, bool | None]]:
        parts = [(part.text, part.style) for part in strip if part.style is not None and part.text]
        return [(text, style.color, style.bgcolor, style.bold) for text, style in parts]

    async with app.run_test(size=(40, 4)) as pilot:
        for theme in ("textual-dark", "textual-light"):
            app.theme = theme
            poem.lines = lambda: iter(lines)
            poem.redraw()
            await settled(pilot)
            for y, line in enumerate(lines):
                assert styles(poem.render_line(y)) == styles(expected(line))


@driven
async def test_numbers_without_bounds_are_not_drawn():
    plot = Plot("loss")
    app = Page(plot)
    async with app.run_test(size=(40, 10)):
        for ys in ([1e308, -1e308, 2.0], [inf, -inf, 2.0], [nan, 1.0, 2.0]):
            plot.show((Curve([1.0, 2.0, 3.0], ys, "red"),))
            assert "loss" in widget_text(plot)
