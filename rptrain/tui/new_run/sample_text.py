"""The samples of a preview as text; tokens in the loss are highlighted."""

from collections.abc import Iterator

from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message

from rptrain.data.samples import FirstSamples, Sample
from rptrain.utils.text import as_message, printable

MAX_CHARACTERS = 1200  # characters of a sample


class Samples(VerticalScroll):
    """Samples of the data, beside the plan on a wide screen."""

    class Shown(Message):
        """The panel is shown because the screen has become wide enough."""

    def on_show(self) -> None:
        self.post_message(self.Shown())


def preview_text(preview: FirstSamples) -> Content:
    return Content("\n").join(_lines(preview))


def _lines(preview: FirstSamples) -> Iterator[Content]:
    legend = Content.assemble("   ", ("trained on", "bold $success"), (" / context only", "$muted"))
    yield Content.assemble(preview.about, legend if preview.samples else "")
    yield from (Content.styled(f"! {as_message(text)}", "$warning") for text in preview.warnings)
    for number, sample in enumerate(preview.samples, 1):
        yield Content("")
        yield Content.styled(f"sample {number}, {sample.tokens:,} tokens", "$accent")
        yield _sample(sample)


def _sample(sample: Sample) -> Content:
    styles = ((printable(part.text), "bold $success" if part.supervised else "$muted") for part in sample.parts)
    whole = Content.assemble(*styles)
    return whole[:MAX_CHARACTERS] + Content("…") if len(whole) > MAX_CHARACTERS else whole.rstrip("\n")
