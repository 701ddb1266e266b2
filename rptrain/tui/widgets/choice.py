"""A choice among a few values in one line, changed by left, right or a click."""

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget


class Choice(Widget, can_focus=True):
    """Shows all `options` with the chosen one marked, or only the chosen one if all do not fit."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "turn(-1)", "before", show=False),
        Binding("right,space,enter", "turn(1)", "next", show=False),
    ]

    value: reactive[str] = reactive("")

    @dataclass
    class Changed(Message):
        choice: "Choice"
        value: str

        @property
        def control(self) -> "Choice":
            return self.choice

    def __init__(self, options: tuple[str, ...], value: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._options = options
        self.set_reactive(Choice.value, value)

    def render(self) -> Content:
        if sum(len(option) + 4 for option in self._options) - 2 > self.size.width:
            return Content.assemble(("‹ ", "$muted"), (self.value, "bold"), (" ›", "$muted"))
        parts: list[tuple[str, str]] = []
        for option in self._options:
            chosen = option == self.value
            mark = "●" if chosen else "○"
            parts += [(f"{mark} {option}", "bold" if chosen else "$muted"), ("  ", "")]
        return Content.assemble(*parts[:-1])

    def action_turn(self, by: int) -> None:
        place = self._options.index(self.value) if self.value in self._options else -1
        self._choose(self._options[(place + by) % len(self._options)])

    def on_click(self, event: Click) -> None:
        if self.render().plain.startswith("‹"):
            self.action_turn(-1 if event.x < 2 else 1)
            return
        start = 0
        for option in self._options:
            end = start + len(option) + 2
            if start <= event.x < end + 1:
                self._choose(option)
                return
            start = end + 2

    def _choose(self, option: str) -> None:
        if option != self.value:
            self.value = option
            self.post_message(self.Changed(self, option))
