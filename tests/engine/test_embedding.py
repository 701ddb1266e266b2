"""Several micro-batches of embedding rows are gathered at once, and no error of a thread that gathers is lost."""

import threading
from itertools import count

import pytest

from rptrain.engine import embedding
from rptrain.engine.errors import EngineError

from .. import run_tools as tools
from . import plain, runs

PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@BOTH
def test_two_micro_batches_are_gathered_at_once(monkeypatch, asynchronous):
    """The first part ends only once a part of the next micro-batch has begun."""
    batches = plain.make_batches(3)
    expected = runs.run(plain.CONFIG, batches, PLAN, asynchronous=asynchronous)
    turns, next_begun, gather = count(), threading.Event(), embedding.gather_rows

    def held(table, ids, out):
        turn = next(turns)
        if turn == 0:
            assert next_begun.wait(tools.PATIENCE), "one micro-batch at a time"
        elif turn == embedding.PARTS:
            next_begun.set()
        gather(table, ids, out)

    monkeypatch.setattr(embedding, "gather_rows", held)
    found = runs.run(plain.CONFIG, batches, PLAN, asynchronous=asynchronous)
    assert found[:2] == expected[:2]
    assert next(turns) == 3 * 4 * embedding.PARTS


@BOTH
def test_an_error_in_a_part_aborts_with_its_place(asynchronous):
    before = {*threading.enumerate()}
    batches = plain.make_batches(3)
    batches[1].input_ids[2, -1] = plain.CONFIG["vocab_size"]
    with pytest.raises(EngineError, match=r"embedding of iteration 1, micro-batch 2: IndexError") as caught:
        runs.run(plain.CONFIG, batches, PLAN, asynchronous=asynchronous)
    assert isinstance(caught.value.__cause__, IndexError)
    assert {*threading.enumerate()} <= before
