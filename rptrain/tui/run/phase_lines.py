"""The phases of a trainer that is starting, as it prints them: a line per second."""

from collections.abc import Iterator

from rptrain.tui.widgets.bars import bar
from rptrain.utils.phases import is_sentence, share_in

WIDTH = 24  # columns of the bar


def phase_in(output: str) -> str | None:
    """A bar and the last line of a trainer's output, if it says how far a phase is; None otherwise."""
    last = output.rpartition("\n")[2]
    if not is_sentence(last):
        return None
    share = share_in(last)
    return last if share is None else f"{bar(share, WIDTH, '').plain} {last}"


def shortened(output: str) -> str:
    """A trainer's output with the last of successive lines about a phase alone."""
    return "\n".join(_shortened(output.split("\n")))


def _shortened(lines: list[str]) -> Iterator[str]:
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not (is_sentence(line) and is_sentence(following)):
            yield line
