"""Some of the bad inputs of `benchmarks/bad_inputs`, and whether what is wrong with a command is seen."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bad_inputs import judge
from benchmarks.bad_inputs.areas import AREAS, all_cases
from benchmarks.bad_inputs.case import CHECK, RUNS, TRAIN, Case
from benchmarks.bad_inputs.edits import text
from benchmarks.bad_inputs.exports import EXPORT
from benchmarks.bad_inputs.run import Slot, run_all
from benchmarks.bad_inputs.server import Ended
from benchmarks.bad_inputs.sound import SECRET

CASES = {case.number: case for case in all_cases()}
SELECTED = {
    "overrides": (3, 56, 98, 106, 171),
    "configs": (180, 204, 232),
    "adapters": (258, 286, 306),
    "runs": (321, 333, 361),
    "resumes": (393,),
    "exports": (322, 446, 469, 494),
    "templates": (512, 739),
    "models": (561, 631, 662, 678),
    "tokenizers": (683,),
    "options": (716, 729, 895),
    "left over": (758,),
    "data": (786, 809, 874, 883),
}


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    with Slot(tmp_path_factory.mktemp("slot") / "slot") as opened:
        yield opened


@pytest.mark.long
def test_a_selection(slot):
    """In one test, because the process that runs the commands takes seconds to start."""
    results = [slot.run(CASES[number]) for numbers in SELECTED.values() for number in numbers]
    assert not {result.case.name: (result.faults, result.output) for result in results if result.faults}


@pytest.mark.corpus
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("area", AREAS)
def test_an_area(area, tmp_path):
    results = run_all(list(AREAS[area]()), tmp_path, 2, lambda result: None)
    assert not {result.case.name: (result.faults, result.output) for result in results if result.faults}


def test_the_selection_has_cases_of_every_area():
    assert SELECTED.keys() == AREAS.keys()
    for area, numbers in SELECTED.items():
        assert {CASES[number].area for number in numbers} == {area}


def test_numbers_and_names_are_unique():
    cases = all_cases()
    assert len(CASES) == len(cases)
    assert not [name for name, count in Counter((case.area, case.name) for case in cases).items() if count > 1]


# What is wrong with a command


def case(*args: str, **values: object) -> Case:
    return replace(Case(0, "none", "none", args), **values)


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "faults"),
    [
        (case(*CHECK, expected="taken"), []),
        (case(*CHECK), ["accepted"]),
        (case(*CHECK, "train.seed=-1", names="train.seed"), []),
        (case(*CHECK, "train.seed=-1", expected="taken"), ["exit code 2"]),
        (case(*CHECK, "train.seed=-1", names="train.steps"), ["does not name train.steps"]),
        (case(*TRAIN, makes=(), expected="taken"), ["created 'runs/r' and "]),
        (case(*EXPORT, "--dtype", "bfloat16", first=EXPORT, expected="taken"), ["changed 'out/"]),
        (case(*RUNS, "--runs", "../outside", expected="taken", edits=(text("../outside/a", "b"),)), []),
    ],
    ids=["taken", "accepted", "refused", "code", "names", "created", "changed", "read"],
)
def test_commands(slot, given, faults):
    found = slot.run(given).faults
    assert len(found) == len(faults)
    for fault, expected in zip(found, faults, strict=True):
        assert fault.startswith(expected)


@pytest.mark.long
def test_limits(slot, monkeypatch):
    monkeypatch.setattr(judge, "NBYTES", 1)
    assert slot.run(CASES[381]).faults[0].startswith("took ")
    monkeypatch.undo()
    monkeypatch.setattr(judge, "SECONDS", 0.01)
    result = slot.run(CASES[381])
    assert result.faults[0] == "ran over 0.01 s" and result.code < 0 and result.seconds < 1


@pytest.mark.parametrize(
    ("stderr", "fault"),
    [
        ("wrong", None),
        ("Traceback (most recent call last):\nOSError", "traceback"),
        ("wrong: [Errno 2] nothing", "stderr has '[Errno'"),
        ("x" * 501, "stderr has a line of 501 characters"),
        ("x\n" * 22, "stderr has 22 lines"),
        ("a\x1b[31mb", "stderr has the control character '\\x1b'"),
        ("a\x9b2Jb", "stderr has the control character '\\x9b'"),
        ("", "no message"),
        (SECRET, "shows a file that it must not read"),
    ],
    ids=["fine", "traceback", "errno", "long", "lines", "escape", "c1", "empty", "secret"],
)
def test_messages(stderr, fault):
    found = list(judge.faults(case(*CHECK), Ended(2, 0.1, 0), "", stderr))
    assert found == ([fault] if fault else [])


def test_memory_that_was_taken_and_given_back():
    assert list(judge.faults(case(*CHECK), Ended(2, 0.1, 3 << 30), "", "wrong")) == ["took 3.0 GiB"]


def test_copies_of_files_outside(tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/copy").write_text(SECRET)
    assert list(judge.copied_secrets(tmp_path, {})) == ["copied a file from outside to 'copy'"]
    assert not list(judge.copied_secrets(tmp_path, {"copy": ()}))
