"""Handling of screens that are left or removed while their workers wait."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from textual.css.query import NoMatches
from textual.screen import ModalScreen, Screen

P = ParamSpec("P")


def is_left(screen: Screen[Any]) -> bool:
    """Whether another screen is shown that is not a dialog over this one."""
    return screen.app.screen is not screen and not isinstance(screen.app.screen, ModalScreen)


def until_closed(
    method: Callable[Concatenate[Any, P], Awaitable[None]],
) -> Callable[Concatenate[Any, P], Awaitable[None]]:
    """Ends a worker quietly if the widgets of its screen were removed."""

    @wraps(method)
    async def work(screen: Screen[Any], *given: P.args, **named: P.kwargs) -> None:
        try:
            await method(screen, *given, **named)
        except NoMatches:
            if screen.children and screen.display and screen.app.is_running:  # a removed screen is not displayed
                raise

    return work
