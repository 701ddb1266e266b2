"""A page of the data browser as text; tokens in the loss are highlighted, and in brackets."""

from collections.abc import Iterator

from textual.content import Content

from rptrain.data.samples import Page, Row
from rptrain.tui.widgets.bars import bar
from rptrain.utils.text import clipped, counted, one_line, printable

MAX_CHARACTERS = 4000  # characters of a row
MARKS = ("⟦", "⟧")  # around what is trained on
LABEL, COUNT = 16, 8  # columns of a bin's name and of its samples


def about_text(page: Page, problems: bool, width: int, bins: int) -> Content:
    """The set, the counts of its rows, and a histogram of at most `bins` lines. `problems`: as in `rows_text`."""
    return Content("\n").join(_about(page, problems, width, bins))


def rows_text(page: Page, problems: bool) -> Content:
    """The rows. `problems`: only those with one were asked for."""
    if not page.rows:
        random = page.sets[page.number] == "builtin:random"
        none = "no row with a problem" if problems else "random tokens, for measuring speed" if random else "no rows"
        return Content.styled(none, "$muted")
    return Content("\n\n").join(_row(row) for row in page.rows)


def _about(page: Page, problems: bool, width: int, bins: int) -> Iterator[Content]:
    of = f"{page.number + 1} of {len(page.sets)}: " if len(page.sets) > 1 else ""
    yield Content.styled(clipped(f"{of}{one_line(page.sets[page.number])}", width), "bold")
    rows = counted(page.read, "row") if page.whole else f"the first {counted(page.read, 'row')}"
    last = page.first + len(page.rows)
    chosen = f"{page.total:,} with problems (b: all)" if problems else f"{page.total:,}"
    place = f"{page.first + 1:,}-{last:,} of {chosen} shown" if page.rows else "none shown"
    counts = "".join(f", {count:,} {kind}" for kind, count in page.counts)
    style = "$warning" if page.counts else "$muted"
    yield Content.styled(clipped(f"{rows} read{counts or ', no problems'}; {place}", width), style)
    if page.repeats:
        repeats = f"{page.repeats:,} samples repeat earlier ones"
        yield Content.styled(clipped(repeats, width), "$warning")
    lengths = f"; {page.span[0]:,} to {page.span[1]:,} tokens per sample" if page.span else ""
    legend = f"trained on: {MARKS[0]}green{MARKS[1]}; context only: gray{lengths}"
    yield Content.styled(clipped(legend, width), "$muted")
    most = max((count for _, count in page.histogram), default=0)
    places = [bound for bound, _ in page.histogram]
    limit = places.index(page.max_length) if page.max_length in places else 0
    start = max(0, min(limit + 1 - bins // 2, len(places) - bins))
    for number, (bound, count) in list(enumerate(page.histogram))[start : start + bins]:
        name = f"{places[number - 1] + 1 if number else 1:,}-{bound:,}"
        space = max(1, width - LABEL - COUNT - 2)
        style = "$primary" if bound <= page.max_length else "$warning"
        line = Content.assemble(f"{name:>{LABEL}} ", bar(count / most, space, style), f" {count:>{COUNT},}")
        yield line
        if bound == page.max_length:
            yield Content.styled(f"{'max_length':>{LABEL}} {f' {bound:,} tokens ':┄^{space}}", "$warning")


def _row(row: Row) -> Content:
    tokens = f", {counted(row.tokens, 'token')}" if row.tokens else ""
    head = Content.styled(f"{one_line(row.place)}{tokens}", "$accent")
    if row.problem:
        head = Content.assemble(head, (f"  ✗ {printable(row.problem)}", "$error"))
    if row.written:
        return Content.assemble(head, "\n", (printable(row.written), "$muted"))
    if not row.parts:
        return head
    shown, left = list[tuple[str, str]](), MAX_CHARACTERS
    for part in row.parts:
        text = printable(part.text)[:left]
        left -= len(text)
        shown.append((text.join(MARKS) if part.supervised else text, "bold $success" if part.supervised else "$muted"))
        if left <= 0:
            shown.append(("…", "$muted"))
            break
    return Content.assemble(head, "\n", *shown).rstrip("\n")
