"""Rules between keys: values that cannot be used together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Tree = TypeVar("Tree")
Found = Iterator[tuple[str, str]]  # keys, each with what is wrong


@dataclass(frozen=True)
class Conflict:
    """A mistake in how keys go together, to be reported at `key`. `keys`: all keys that it depends on."""

    key: str
    text: str
    keys: tuple[str, ...]

    @property
    def path(self) -> tuple[str | int, ...]:
        """The parts of the key, numbers of data sets as such."""
        return tuple(int(part) if part.isdecimal() else part for part in self.key.split("."))


class Rules(Generic[Tree]):
    """The rules of a config."""

    def __init__(self) -> None:
        self._rules: list[tuple[tuple[str, ...], Callable[[Tree], Found]]] = []

    def about(self, *keys: str) -> Callable[[Callable[[Tree], Found]], Callable[[Tree], Found]]:
        """A decorator that adds a rule, which depends on these keys."""

        def add(rule: Callable[[Tree], Found]) -> Callable[[Tree], Found]:
            self._rules.append((keys, rule))
            return rule

        return add

    def broken(self, config: Tree) -> list[Conflict]:
        """Every mistake, in the order of the rules."""
        return [Conflict(key, text, keys) for keys, rule in self._rules for key, text in rule(config)]
