"""Scrolled content whose end stays visible."""

from textual.containers import VerticalScroll


class Tail(VerticalScroll):
    """Keeps its end visible until the user scrolls away."""

    _follows = True

    def on_resize(self) -> None:
        self._follow()

    def watch_virtual_size(self) -> None:
        """Called after the content was laid out in another size."""
        self._follow()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follows = new_value >= self.max_scroll_y - 1

    def _follow(self) -> None:
        if self._follows:
            self.scroll_end(animate=False)
