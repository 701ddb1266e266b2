"""Regular expressions that a person gives, which may take time without end: `re` tries all ways to match."""

import re
from collections.abc import Iterable

from rptrain.utils.limited import Limited, call

SECONDS, MEMORY = 5.0, 256 << 20  # to compile a pattern and match it against all names


class InvalidPattern(ValueError):
    """A pattern cannot be used. The message is a predicate, such as "is not a valid pattern: …"."""


def full_matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that the pattern matches as a whole. Raises InvalidPattern, also if this takes too long."""
    try:
        return call(_full_matches, pattern, list(names), seconds=SECONDS, memory=MEMORY)
    except Limited as error:
        raise InvalidPattern(f"{error} to match; repetitions within repetitions do: write a simpler pattern") from None


def _full_matches(pattern: str, names: list[str]) -> set[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidPattern(f"is not a valid pattern: {reason}") from None
    return {name for name in names if compiled.fullmatch(name)}
