"""Keys that a widget leaves to its screen, so that footer and palette show the screen's actions."""

from textual.binding import Binding, BindingType
from textual.widget import Widget

# Textual's names for alt and the digits 1 to 9 in terminals that send escape and the digit
ALT_DIGITS = (
    *("inverted_exclamation_mark", "trade_mark_sign", "pound_sign", "cent_sign", "infinity"),
    *("section_sign", "pilcrow_sign", "bullet", "ª"),
)


def without_enter(widget: type[Widget]) -> list[BindingType]:
    """The bindings of a widget class without enter, for a subclass with inherit_bindings=False."""
    return [binding for binding in widget.BINDINGS if not (isinstance(binding, Binding) and binding.key == "enter")]
