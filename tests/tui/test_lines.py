"""Lines of text are drawn again where they changed, and only there."""

from collections.abc import Iterator

from textual.app import App, ComposeResult
from textual.content import Content
from textual.strip import Strip

from rptrain.tui.line_widget import LineWidget

from .conftest import driven, screen_text


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


class Page(App[None]):
    def compose(self) -> ComposeResult:
        yield Poem()


@driven
async def test_what_changed_is_drawn_again_and_nothing_else():
    app = Page()
    async with app.run_test(size=(20, 4)) as pilot:
        poem = app.query_one(Poem)
        await pilot.pause()

        async def drawn() -> list[int]:
            await pilot.pause()
            poem.drawn.clear()
            poem.redraw()
            await pilot.pause()
            return poem.drawn

        assert await drawn() == []
        poem.rows[1] = ("two", "green")  # the colour alone
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
