"""The progress of reading data, as a trainer that is starting prints it: a line per second."""

from collections.abc import Iterator

from rptrain.data.progress import is_sentence, share_in
from rptrain.tui.widgets.bars import bar

WIDTH = 24  # columns of the bar


def reading_in(output: str) -> str | None:
    """A bar and the last line of a trainer's output, if it says how far the data is read; None otherwise."""
    last = output.rpartition("\n")[2]
    if not is_sentence(last):
        return None
    share = share_in(last)
    return last if share is None else f"{bar(share, WIDTH, '').plain} {last}"


def shortened(output: str) -> str:
    """A trainer's output with the last of successive lines about reading alone."""
    return "\n".join(_shortened(output.split("\n")))


def _shortened(lines: list[str]) -> Iterator[str]:
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not (is_sentence(line) and is_sentence(following)):
            yield line
