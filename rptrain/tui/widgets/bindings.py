"""Keys that a widget leaves to its screen, so that footer and palette show the screen's actions."""

from textual.binding import Binding, BindingType
from textual.widget import Widget


def without_enter(widget: type[Widget]) -> list[BindingType]:
    """The bindings of a widget class without enter, for a subclass with inherit_bindings=False."""
    return [binding for binding in widget.BINDINGS if not (isinstance(binding, Binding) and binding.key == "enter")]
