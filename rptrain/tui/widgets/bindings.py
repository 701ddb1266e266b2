"""Keys that a widget leaves to its screen: the footer and the palette offer what they do there."""

from textual.binding import Binding, BindingType
from textual.widget import Widget


def without_enter(widget: type[Widget]) -> list[BindingType]:
    """The bindings of a kind of widget, for one with inherit_bindings=False."""
    return [binding for binding in widget.BINDINGS if not (isinstance(binding, Binding) and binding.key == "enter")]
