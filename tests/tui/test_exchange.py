"""A turn of a conversation."""

from textual.containers import Vertical

from rptrain.tui.chat.exchange import Exchange
from rptrain.tui.chat.session import ShownTurn

from .conftest import Page, driven


@driven
async def test_the_app_may_close_while_a_turn_is_mounted():
    async with Page(Vertical()).run_test() as pilot:
        pilot.app.query_one(Vertical).mount(Exchange(ShownTurn("one", waiting=True)))
