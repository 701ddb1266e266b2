"""The functions that run in the helper process, and their results as values that can be pickled."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rptrain.config.resolve import resolve
from rptrain.config.schema import TrainSet
from rptrain.doctor.checks import Check
from rptrain.utils.errors import UserError

SAMPLES = 3  # conversations in a preview


@dataclass(frozen=True)
class Planned:
    """A plan's report for the screen."""

    report: dict[str, Any]  # see rptrain.planner.report
    stages: str  # as text; empty without a plan
    advice: str

    @property
    def fits(self) -> bool:
        return self.report["fits"]


@dataclass(frozen=True)
class Sample:
    """A rendered conversation or text, and the characters of it that the loss counts."""

    text: str
    spans: tuple[tuple[int, int], ...]
    tokens: int


@dataclass(frozen=True)
class Preview:
    """The first samples of a data set, and facts about the whole set."""

    about: str
    samples: tuple[Sample, ...]


def plan(path: Path, text: str) -> Planned:
    """The report of `rptrain plan` for a config with this text."""
    from rptrain.planner.machine_flags import MachineFlags
    from rptrain.planner.report import report
    from rptrain.planner.text import describe

    found = report(resolve(path, text=text), MachineFlags())
    stages = describe(found.run.plan.stages) if found.run else ""
    return Planned(found.to_dict(), stages, str(found.advice))


def preview(path: Path, text: str) -> Preview:
    """The first samples of a config's first data set, as its model reads them."""
    from rptrain.data.folders import choose
    from rptrain.data.loader import RANDOM, TASKS, load_tokenizer
    from rptrain.data.template import Renderer, load_template
    from rptrain.models.registry import locate

    config = resolve(path, text=text).config
    source = config.data.train[0]
    if source.path == RANDOM:
        return Preview("random tokens, for measuring speed", ())
    tokenizer = load_tokenizer(locate(config.model.path))
    examples = _first_examples(source)
    renderer = None
    samples = []
    for example in examples:
        if example.messages is None:
            shown, spans = example.text or "", [(0, len(example.text or ""))]
        else:
            renderer = renderer or Renderer(tokenizer, load_template(tokenizer, config.data.chat_template))
            try:
                shown, spans = renderer.render(example, config.data.assistant_only_loss)
            except ValueError as error:
                raise UserError(f"{example.place}: {error}") from None
        samples.append(Sample(shown, tuple(spans), len(tokenizer(shown, verbose=False)["input_ids"])))
    if source.path == TASKS:
        return Preview("questions that rptrain makes up", tuple(samples))
    nbytes = sum(file.stat().st_size for file in choose(source.path, source.split).files)
    kind = "conversations" if examples[0].messages is not None else "texts"
    return Preview(f"{kind}, {nbytes / 1e6:,.1f} MB", tuple(samples))


def _first_examples(source: TrainSet) -> list[Any]:
    """The first examples; reads no more of the files than needed."""
    from itertools import islice

    from rptrain.data import formats, tasks
    from rptrain.data.folders import choose
    from rptrain.data.loader import TASKS

    if source.path == TASKS:
        asked = tasks.questions("train", SAMPLES)
        return [formats.Example(TASKS, line, messages=one.messages) for line, one in enumerate(asked, 1)]
    return list(islice(formats.read(choose(source.path, source.split).files[0], source.format), SAMPLES))


def doctor(runs: Path) -> list[Check]:
    """The checks of `rptrain doctor`."""
    from rptrain.doctor.examine import examine

    return [replace(finding, figures={}) for finding in examine(runs)]
