"""A banner with what went wrong and what to do about it."""

from textual.content import Content
from textual.widgets import Static

from rptrain.utils.text import one_line


class Banner(Static):
    """Takes no space without a text."""

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._shown: tuple[str, str] = ("", "")
        self.display = False

    def show(self, what: str, remedy: str = "") -> None:
        """`what` happened and the `remedy`, each on lines of its own. Without `what` the banner is hidden."""
        if (what, remedy) == self._shown:
            return
        self._shown = what, remedy
        self.display = bool(what)
        self.screen.set_class(bool(what), "-with-banner")
        self.update(
            Content.assemble(("✗ ", "bold"), (one_line(what), "bold"), f"\n  {one_line(remedy)}" if remedy else "")
        )
