"""The changes that make a run fit, or make it better, each with its key."""

from collections.abc import Mapping

from textual.binding import Binding
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from rptrain.config.types import format_size
from rptrain.tui.new_run.planning import Planned
from rptrain.tui.new_run.setting_text import with_labels
from rptrain.tui.widgets.bindings import ALT_DIGITS

REMEDY_BINDINGS = (
    *(Binding(f"alt+{n},{other}", f"remedy({n})", show=False, priority=True) for n, other in enumerate(ALT_DIGITS, 1)),
    *(Binding(str(n), f"remedy({n})", show=False) for n in range(1, 10)),
    Binding("ctrl+g", "advice", show=False),
)


class AdviceList(OptionList):
    """Is shown for a plan that does not fit, or with longer sequences than its data needs. The ids of its options are
    the numbers of the changes, from 1.
    """

    def __init__(self) -> None:
        super().__init__(id="advice", compact=True)
        self._remedies: list[Mapping[str, object]] = []
        self.display = False

    def on_focus(self) -> None:
        if self.highlighted is None and self._remedies:
            self.highlighted = 1  # the first change, below the title

    def propose(self, planned: Planned | None) -> None:
        """Shows the changes that a plan proposes; None: nothing."""
        self.clear_options()
        self._remedies = []
        title = ""
        if planned is not None and planned.too_large:
            self._remedies = [remedy["changes"] for remedy in planned.report["advice"]["remedies"]]
            title = planned.advice.partition("\n")[0]
        elif planned is not None and (length := planned.report["length"]) and length["shorter"]:
            self._remedies.append({"data.max_length": length["shorter"]})
            title = "the samples are short:"
        self.display = bool(title)
        if planned is None or not title:
            return
        keys = " (ctrl+g):" if self._remedies else ""
        title = f"{title[:1].upper()}{title[1:].removesuffix(':')}{keys}"
        self.add_option(Option(Content.styled(title, "bold"), disabled=True))
        for number in range(1, len(self._remedies) + 1):
            text = with_labels(", ".join(f"{key} = {value}" for key, value in self.changes(number).items()))
            self.add_option(Option(Content.assemble((f"alt+{number} ", "$accent"), text), id=str(number)))
        if problem := planned.report["problem"]:
            self.add_option(Option(Content.styled(with_labels(problem), "$muted"), disabled=True))

    def changes(self, number: int) -> dict[str, str]:
        """The values of a change by key, as a user writes them; empty if the change does not exist."""
        if number > len(self._remedies):
            return {}
        return {key: _written(key, value) for key, value in self._remedies[number - 1].items()}


def _written(key: str, value: object) -> str:
    """The value as a user writes it; a limit in bytes becomes a size."""
    if key in ("engine.vram_limit", "engine.host_limit") and isinstance(value, int):
        return format_size(value)
    return str(value)
