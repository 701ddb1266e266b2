"""The phases of whole runs, and what a run reports about its speed while it warms up."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.checkpoint.checked import BASE_WEIGHTS, WEIGHTS
from rptrain.checkpoint.export import export
from rptrain.checkpoint.unit_tensors import PARAM_HASH
from rptrain.inference.free_memory import free_memory
from rptrain.inference.generate import Request, generate_text
from rptrain.kernels import compiling
from rptrain.runs.records import events
from rptrain.runs.view.run_view import RunView
from rptrain.train import progress
from rptrain.utils import phases
from rptrain.utils.phases import Phase
from tests import run_tools as tools

ROWS = '{"text": "Two and two is four, and four and four is eight."}\n' * 40


class Entered(list[Phase]):
    """The open phases, which remembers all that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Phase] = []

    def append(self, one: Phase) -> None:
        self.seen.append(one)
        super().append(one)

    def remove(self, one: Phase) -> None:
        one.update()
        super().remove(one)

    def names(self) -> list[str]:
        """The names in order, each once."""
        found = [*dict.fromkeys(one.name.partition(",")[0] for one in self.seen)]
        self.seen.clear()
        return found


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Entered]:
    found = Entered()
    monkeypatch.setattr(phases, "_open", found)
    yield found
    assert not found, "every phase has ended"


def check(found: list[str], *wanted: str) -> None:
    """The names have these, in this order."""
    assert [name for name in found if name in wanted] == [*wanted]


def test_what_takes_long_in_a_run_is_a_phase_with_its_share(tmp_path: Path, entered: Entered):
    tools.write_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(ROWS)
    data = f'data.train=[{{path="{tmp_path}/a.jsonl"}}]'
    settings = (data, "data.val_size=4", "train.micro_batch_size=2", "train.global_batch_size=4")
    run = tools.train_here(tmp_path, *settings, "train.max_steps=2", "train.eval_steps=1", "save.save_steps=1")
    shares = {one.name.partition(",")[0]: (one.done, one.total) for one in entered.seen}
    for name in (
        "reading weights",
        "running the first step",
        "running step 2",
        "saving checkpoint-2",
        "writing the export",
    ):
        done, total = shares[name]
        assert total and done >= total / 2, f"{name}: {done} of {total}"
    check(
        entered.names(),
        "looking for devices",
        "planning",
        "checking the model's files",
        "loading the tokenizer",
        "reading a.jsonl",
        "hashing a.jsonl",
        "packing sequences",
        "reading weights",
        "copying weights",
        "opening the devices",
        "running the first step",
        "evaluating the validation set",
        "saving checkpoint-1",
        "saving checkpoint-2",
        "checking the weights",
        "writing the export",
        "reading the export back",
        "hashing weights",
    )
    export(run.path, tmp_path / "to")
    check(entered.names(), "checking the checkpoint", "hashing checkpoint-2", "writing the export", "hashing weights")
    export(run.path, tmp_path / "to")
    check(entered.names(), "hashing to", "checking the checkpoint")
    generate_text(Request(tmp_path / "to", ["Two"], 1), free_memory(""))
    check(entered.names(), "loading the tokenizer", "reading weights")
    tools.train_here(tmp_path, *settings, "train.max_steps=3", f'save.resume="{run.path}"')
    check(entered.names(), "reading the tokens of a.jsonl", "reading checkpoint-2", "running the first step")


def forget_digests(directory: Path) -> None:
    """As an earlier version wrote it: with hashes of whole files alone."""
    manifest = json.loads((directory / MANIFEST).read_text())
    for key in (WEIGHTS, BASE_WEIGHTS):
        manifest.pop(key, None)
    for entry in manifest["files"].values():
        entry.pop(PARAM_HASH, None)
    (directory / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.sample(2, gate=4)
@pytest.mark.parametrize("earlier", [False, True], ids=["now", "earlier"])
@pytest.mark.parametrize("lora", [(), ("lora.r=2", "lora.base=nf4")], ids=["full", "nf4"])
def test_the_bytes_of_weights_that_are_read_are_those_that_were_announced(
    tmp_path: Path, entered: Entered, lora: tuple[str, ...], earlier: bool
):
    """Each byte of a tensor counts once, whatever is hashed; the hashing of whole files is a phase of its own."""
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, *lora, "train.max_steps=1")
    for source in (run.checkpoints()[-1], run.model_path):
        if earlier:
            forget_digests(source)
        generate_text(Request(source, ["Two"], 1), free_memory(""))
    key = "lora.adapter" if lora else "model.path"
    tools.train_here(tmp_path, *lora, f"{key}={run.model_path}", "train.max_steps=1", "log.run_name=next")
    counts = [(one.name, one.done, one.total) for one in entered.seen if one.reads and one.total]
    assert not [(name, done, total) for name, done, total in counts if done > total]
    read = [entry for entry in counts if entry[0].startswith("reading") and entry[0].endswith("weights")]
    assert len(read) >= 4 and all(done == total for _, done, total in read), read
    hashed = [name for name, *_ in counts if name in ("hashing model", "hashing checkpoint-1")]
    assert {*hashed} == ({"hashing model", "hashing checkpoint-1"} if earlier else {"hashing model"} if lora else set())


def test_a_run_of_two_steps_reports_the_speed_of_all_and_has_none_for_later_plans(tmp_path: Path):
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, "train.max_steps=2")
    first, second = tools.events(run, events.Step)
    assert first.warm_up and second.warm_up and min(first.tokens_per_second, second.tokens_per_second) > 0
    view = RunView(run.path)
    assert view.tokens_per_second is None and view.average_tokens_per_second == second.tokens_per_second
    lines = [progress.describe([step], 2) for step in (first, second)]
    assert lines[0].endswith("warming up") and lines[1].endswith("tokens/s with the warm-up")


@pytest.mark.parametrize("hit", [False, True], ids=["compiled", "loaded"])
def test_a_step_in_which_a_kernel_was_made_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hit: bool):
    compiled = compiling.Compiled()
    monkeypatch.setattr("rptrain.train.trainer.COMPILED", compiled)
    counted: list[bool] = []

    def finished(throughput: object, tokens: int, *, warm_up: bool) -> float | None:
        counted.append(not warm_up)
        for _ in range(len(counted) == 3):  # during the fourth step
            compiled(cache_hit=hit)
        return 5.0

    monkeypatch.setattr("rptrain.train.steps.Throughput.finished", finished)
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, "train.max_steps=6")
    assert counted == [False, True, True, False, True, True]
    assert [step.compiled for step in tools.events(run, events.Step)] == [0, 0, int(not hit), 0, 0, 0]


@pytest.mark.skipif(not compiling.HAS_TRITON, reason="needs Triton")
def test_compiled_kernels_are_counted_and_those_in_the_cache_are_not(monkeypatch: pytest.MonkeyPatch):
    heard: list[bool] = []
    knobs = compiling.triton.knobs.compilation
    monkeypatch.setattr(knobs, "listener", lambda *, cache_hit, **more: heard.append(cache_hit))
    compiled = compiling.Compiled()
    compiled.watch()
    compiled.watch()
    for hit in (False, True, False):
        knobs.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert (compiled.count, compiled.made) == (2, 3) and heard == [False, True, False], (
        "the listener that was there is called, too"
    )
