"""Workers of a screen that is taken down while they wait."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from textual.css.query import NoMatches
from textual.screen import Screen

P = ParamSpec("P")


def until_closed(
    method: Callable[Concatenate[Any, P], Awaitable[None]],
) -> Callable[Concatenate[Any, P], Awaitable[None]]:
    """Ends a worker quietly that finds the parts of its screen gone."""

    @wraps(method)
    async def work(screen: Screen[Any], *given: P.args, **named: P.kwargs) -> None:
        try:
            await method(screen, *given, **named)
        except NoMatches:
            if screen.children and screen.display:  # a screen that is taken down is not displayed
                raise

    return work
