"""Phases of a process: what it does, how far it is, and which of several is shown."""

import threading
from collections.abc import Iterator

import pytest

from rptrain.utils import phases
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import BYTES, Phase, current, during, is_sentence, phase, share_in


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(phases, "monotonic", lambda: clock.now)
    yield clock
    assert not phases._open


@pytest.mark.parametrize(
    ("given", "sentence", "share"),
    [
        (("reading weights", 16 << 30), "reading weights: 4.00 GiB of 16.0 GiB, 25%, 30 s left", 0.25),
        (
            ("copying a.csv", 16 << 30, "row"),
            "copying a.csv: 4,294,967,296 of 17,179,869,184 rows, 25%, 30 s left",
            0.25,
        ),
        (("running the first step", 16 << 30, ""), "running the first step: 25%, 30 s left", 0.25),
        (("hashing a\n.jsonl",), "hashing a␊.jsonl: 4.00 GiB", None),
        (("loading libraries", None, ""), "loading libraries: 10 s", None),
    ],
)
def test_sentences(clock: Clock, given: tuple[str, int, str], sentence: str, share: float | None):
    one = Phase(*given)
    clock.now += 10
    one.done = 4 << 30
    assert one.sentence() == sentence
    assert is_sentence(sentence) and share_in(sentence) == share
    assert "took 10 s" in one.summary() and not is_sentence(one.summary())
    assert not is_sentence("reading a.jsonl: no such file") and not is_sentence("a warning: 3 rows")
    assert not is_sentence("warning: 3 rows were skipped") and not is_sentence("training: 3 mistakes in the config")


def test_the_innermost_phase_that_lasts_is_shown(clock: Clock):
    with phase("reading data") as outer:
        clock.now += 3
        for _ in range(3):
            with phase("hashing a.jsonl") as inner:
                assert current() is outer
                clock.now += 1.9
                assert current() is outer and inner.root is outer
        with phase("hashing b.jsonl") as inner:
            clock.now += 2
            assert current() is inner
        assert current() is outer and inner.seconds == 2
    assert current() is None


def test_a_phase_ends_with_an_error(clock: Clock):
    with pytest.raises(KeyboardInterrupt), phase("reading data"), phase("hashing a.jsonl"):
        clock.now += 5
        raise KeyboardInterrupt
    assert current() is None


def test_what_threads_have_done_counts_once(clock: Clock):
    with phase("reading weights", 4000, reads=True) as reading:
        threads = [threading.Thread(target=lambda: [phases.read(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert reading.done == 4000 and reading.fraction == 1
        with phase("packing sequences", unit=""):
            phases.read(1)
        assert reading.done == 4000
    phases.read(1)


def test_items_that_are_done_in_parallel_are_counted_in_order():
    found: list[int] = []
    with phase("hashing", 10, BYTES):
        in_parallel(lambda item: None, range(5), done=found.append)
    assert found == [0, 1, 2, 3, 4]


def test_a_phase_that_began_before_it_was_waited_for_and_is_updated_when_it_is_looked_at(clock: Clock):
    saving = Phase("saving checkpoint-3", 10)
    saving.update = lambda: setattr(saving, "done", 5)
    clock.now += 8
    with during(saving):
        assert current() is saving and saving.done == 5
        assert saving.sentence() == "saving checkpoint-3: 5 B of 10 B, 50%, 8 s left"
    assert saving.ended == 108
