"""New run: the focus is on a setting that is shown, at every size, and what is typed goes there."""

import pytest
from textual.containers import VerticalScroll
from textual.events import MouseScrollDown
from textual.widget import Widget
from textual.widgets import Input

from rptrain.tui.app import RptrainApp
from rptrain.tui.new_run.form import Form, Row

from .conftest import Made, driven, focus, press_until, screen_text, settled, until

pytestmark = pytest.mark.long

SIZES = ((60, 16), (80, 24), (200, 50))


def focused_row(app: RptrainApp) -> Row:
    assert app.focused is not None
    return next(node for node in app.focused.ancestors if isinstance(node, Row))


def rows(app: RptrainApp) -> list[Row]:
    return [row for row in app.screen.query(Row) if row.display]


def is_in_view(widget: Widget) -> bool:
    """Whether all of a widget of the form is in view."""
    return widget.region in widget.screen.query_one(Form).region


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", SIZES)
@driven
async def test_down_and_up_move_between_all_settings(make: Made, size: tuple[int, int]):
    app = make()
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        for key, order in (("down", rows(app)), ("up", rows(app)[::-1])):
            assert focused_row(app) is order[0]
            for row in order[1:]:
                await press_until(pilot, key, lambda row=row: app.focused in row.walk_children())
                await until(pilot, lambda row=row: is_in_view(row))
        assert app.screen.query_one(Form).scroll_y == 0


@driven
async def test_the_wheel_and_pages_take_the_focus_along(make: Made):
    app = make()
    async with app.run_test(size=(80, 16)) as pilot:
        await settled(pilot)
        form = app.screen.query_one(Form)
        first = focused_row(app)
        form.scroll_end(animate=False)  # as a row that becomes higher may do it: the next key is for the same setting
        await until(pilot, lambda: form.scroll_y == form.max_scroll_y)
        assert focused_row(app) is first
        form.scroll_home(animate=False)
        at = (form.region.x + 1, form.region.y + 1)
        for _ in range(40):
            app.post_message(MouseScrollDown(None, *at, 0, 1, 0, False, False, False, *at))
        await until(pilot, lambda: focused_row(app) is not first and is_in_view(focused_row(app)))
        await press_until(pilot, "pageup", lambda: form.scroll_y < form.max_scroll_y)
        await until(pilot, lambda: is_in_view(focused_row(app)))
        await press_until(pilot, "ctrl+home", lambda: focused_row(app) is first)
        assert isinstance(form, VerticalScroll)


@driven
async def test_a_smaller_terminal_shows_the_focus(make: Made):
    app = make()
    async with app.run_test(size=(80, 50)) as pilot:
        await settled(pilot)
        await focus(pilot, "#log-report_to")
        await pilot.resize_terminal(60, 16)
        await settled(pilot)
        assert is_in_view(focused_row(app)) and app.focused is app.screen.query_one("#log-report_to", Input)


@driven
async def test_the_help_line_is_about_what_has_the_focus(make: Made):
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await focus(pilot, "#save")
        await until(pilot, lambda: "Save: enter saves the config" in screen_text(app))
        await focus(pilot, "#train-num_epochs")
        await until(pilot, lambda: "epochs (train.num_epochs): " in screen_text(app))
        await focus(pilot, "#plan")
        await until(pilot, lambda: "The plan of these settings" in screen_text(app))


@driven
async def test_typing_replaces_what_got_the_focus_and_inserts_at_a_chosen_cursor(make: Made):
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        steps = app.screen.query_one("#train-max_steps", Input)
        assert steps.value == "1500"
        await focus(pilot, "#train-num_epochs")
        await press_until(pilot, "down", lambda: app.focused is steps)
        await pilot.press(*"40")
        await until(pilot, lambda: steps.value == "40")
        for key in ("up", "down"):
            await pilot.press(key)
        await pilot.press("home", "1")
        await until(pilot, lambda: steps.value == "140")
        await focus(pilot, "#train-num_epochs")
        await pilot.click(steps, offset=(2, 0))
        await until(pilot, lambda: app.focused is steps)
        await pilot.press("9")
        await until(pilot, lambda: steps.value == "1490")


@pytest.mark.sample(2)
@pytest.mark.parametrize("keys", [("f1", "escape"), ("f4", "f2"), ("f5", "escape"), ("ctrl+p", "escape")])
@driven
async def test_typing_replaces_the_value_after_another_screen_or_dialog(make: Made, keys: tuple[str, str]):
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        new, steps = app.screen, await focus(pilot, "#train-max_steps")
        assert isinstance(steps, Input)
        await press_until(pilot, "end", lambda: steps.selection.is_empty)
        await press_until(pilot, keys[0], lambda: app.screen is not new)
        await settled(pilot)
        await press_until(pilot, keys[1], lambda: app.screen is new)
        await pilot.press(*"7")
        await until(pilot, lambda: steps.value == "7")


@driven
async def test_typing_replaces_what_was_chosen_from_a_list(make: Made):
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        new, model = app.screen, await focus(pilot, "#model-path")
        assert isinstance(model, Input)
        await press_until(pilot, "enter", lambda: app.screen is not new)
        await until(pilot, lambda: "llama-3.1-8b" in screen_text(app))
        await pilot.press(*"llama", "enter")
        await until(pilot, lambda: app.screen is new and model.value == "llama-3.1-8b")
        await pilot.press(*"my model")  # a space at the end of what is typed so far stays
        await until(pilot, lambda: model.value == "my model")
