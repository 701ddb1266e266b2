"""The samples of a preview as text; tokens in the loss are highlighted."""

from collections.abc import Iterator

from textual.content import Content

from rptrain.tui.services.heavy import Preview, Sample
from rptrain.utils.text import printable

MAX_CHARACTERS = 1200  # characters of a sample


def preview_text(preview: Preview) -> Content:
    return Content("\n").join(_lines(preview))


def _lines(preview: Preview) -> Iterator[Content]:
    learned = Content.assemble("   ", ("trained on", "bold $success"), (" / context only", "$muted"))
    yield Content.assemble(preview.about, learned if preview.samples else "")
    for number, sample in enumerate(preview.samples, 1):
        yield Content("")
        yield Content.styled(f"sample {number}, {sample.tokens:,} tokens", "$accent")
        yield _sample(sample)


def _sample(sample: Sample) -> Content:
    parts: list[tuple[str, str]] = []
    end = 0
    shown = printable(sample.text)
    for start, stop in sample.spans:
        parts += [(shown[end:start], "$muted"), (shown[start:stop], "bold $success")]
        end = stop
    parts.append((shown[end:], "$muted"))
    whole = Content.assemble(*parts)
    return whole[:MAX_CHARACTERS] + Content("…") if len(sample.text) > MAX_CHARACTERS else whole.rstrip("\n")
