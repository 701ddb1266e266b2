"""What a traced engine notes, and what it makes of a delay anywhere; tracing changes no bit, and costs nothing off."""

import time
from itertools import pairwise

import pytest
import torch

from rptrain.bench.idle import usage
from rptrain.bench.timeline import lanes
from rptrain.engine.board import Board
from rptrain.engine.devices.cpu import CpuStream
from rptrain.engine.trace import WatchedBoard
from rptrain.engine.transfer.copies import Upload
from rptrain.engine.worker import Worker
from rptrain.schedule.plan import Plan
from tests.cases import UPDATES

from . import plain, runs

CFG = plain.config()
TWO = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"
ONE = TWO.replace("N=2", "N=1")
FUSED = "FB0-4 | N=1 M=4 MR=2"
ROUNDS = "F0-2 FB3-4 B2-2 B1-1 B0-0 | N=2 M=4 MR=2"
PAUSES = (0.02, 0.1, 0.5)  # of a delay that is looked for
STEPS = 4


def traced(plan, *, asynchronous=True, probe=None, between=0.0):
    """All spans of a run; it waits for each step, and then for `between` seconds."""
    rounds = Plan.parse(plan).rounds
    with (
        runs.make_store(CFG, torch.float32, asynchronous=asynchronous, wide_grad=rounds > 1) as store,
        runs.engine_of(store, plan, tokens=32, asynchronous=asynchronous, probe=probe, trace=True) as engine,
    ):
        for batch in plain.make_batches(STEPS):
            engine.forward_backward(batch)
            engine.step(1e-3)
            if between:
                engine.synchronize()
                time.sleep(between)
        engine.synchronize()
    return [span for iteration in range(STEPS) for span in engine.trace.take(iteration)]


@UPDATES
@pytest.mark.parametrize("plan", [TWO, ROUNDS])
def test_tracing_changes_no_bit(plan, asynchronous):
    batches = plain.make_batches(4)
    without, with_trace = (
        runs.run(CFG, batches, plan, asynchronous=asynchronous, dtype=torch.bfloat16, trace=trace, max_grad_norm=1.0)
        for trace in (False, True)
    )
    assert with_trace[:2] == without[:2]
    assert all(torch.equal(with_trace[2][name], without[2][name]) for name in without[2])
    assert not without[3] and len(with_trace[3]) == 4 * 5 * 4


def test_without_a_trace_there_are_no_marks(monkeypatch):
    def mark(stream):
        raise AssertionError("a mark")

    monkeypatch.setattr(CpuStream, "mark", mark)
    runs.run(CFG, plain.make_batches(2), TWO, asynchronous=True)
    with runs.make_store(CFG, torch.float32, asynchronous=True) as store:
        for trace, kind in ((False, Board), (True, WatchedBoard)):
            with runs.engine_of(store, TWO, tokens=32, trace=trace) as engine:
                assert type(engine._context.board) is kind


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("plan", [TWO, ROUNDS])
def test_what_a_computation_needed_was_there_before_it_began(plan, asynchronous):
    spans = traced(plan, asynchronous=asynchronous)
    parsed = Plan.parse(plan)
    for iteration in range(STEPS):
        for slot in parsed.slots(iteration):
            own = [span for span in spans if span.iteration == iteration and span.slot == slot]
            zeroed = ["zeroing"] if slot.stage.backward and slot.round == 0 else []
            assert [span.work for span in own] == [*zeroed, *slot.micro_batches]
            micro_batches = [span for span in own if span.micro_batch is not None]
            assert [len(span.copies) for span in micro_batches] == [
                2 if slot.stage.kind == "B" else 1
            ] * parsed.round_size
            assert all(0 < span.embedded < span.start() for span in micro_batches)
            first, *others = micro_batches
            assert all(piece.parameters is not None for piece in first.pieces)
            assert all(piece.parameters is None for span in others for piece in span.pieces)
            back = slot.stage.kind == "B" or (slot.stage.kind == "FB" and len(slot.stage.layers) > 1)
            assert len(first.pieces) in (1, len(slot.stage.layers) + back)
    for span in spans:
        assert span.submission.time < span.begun <= span.issued
        for copy in span.copies:
            assert span.begun < copy.issued < copy.began() < copy.arrived() < span.start()
        assert all(stamp() < span.start() for stamp in span.freed)
        for piece in span.pieces:
            assert span.begun < piece.launched < piece.start() < piece.end()
            if piece.parameters is not None:
                assert piece.parameters.published < piece.parameters.arrived() < piece.start()
    assert any(span.freed for span in spans)
    for device in range(2):
        pieces = [piece for span in spans if span.slot.device == device for piece in span.pieces]
        assert all(before.end() < after.start() for before, after in pairwise(pieces))


def test_a_stage_that_is_updated_late_is_computed_layer_by_layer_and_its_waits_are_no_computation():
    for pause in PAUSES:  # a machine that is busy with other work needs a longer one
        delayed = []  # when each delay was over

        def slow(where, pause=pause, delayed=delayed):
            if where.startswith("optimizer update of layers.1"):
                time.sleep(pause)
                delayed.append(time.perf_counter())

        spans = [span for span in traced(TWO, asynchronous=False, probe=slow) if span.iteration > 0]
        first = next(span for span in spans if span.slot.index == 0)
        assert len(first.pieces) in (1, 2)
        assert delayed[0] < first.pieces[-1].parameters.published
        waited = first.end() - first.start() - sum(piece.end() - piece.start() for piece in first.pieces)
        if first.pieces[0].parameters.published < delayed[0] and waited > 0.5 * pause:
            return
    raise AssertionError(f"{len(first.pieces)} pieces, and {waited} seconds between them")


def idle(spans, device=0):
    """The causes of a device's idle time in all but the first step, the largest first."""
    (begin, _), (_, end) = ((s.start(), s.end()) for s in (next(s for s in spans if s.iteration == 1), spans[-1]))
    lane = lanes(["cpu:0", "cpu:1"], spans, [])[device]
    used = usage(lane.computations, lane.host, (begin, end))
    assert used.busy + sum(used.idle.values()) == pytest.approx(used.total)
    return sorted(used.idle, key=used.idle.get, reverse=True)


def assert_largest(cause, causes):
    """Of a delay: one that the machine's other work outweighs is made longer, which mends no wrong cause."""
    for pause in PAUSES:
        if (found := causes(pause))[0] == cause:
            return
    raise AssertionError(f"the causes are {found}, not {cause}")


@pytest.mark.parametrize(
    ("place", "plan", "device", "cause", "asynchronous"),
    [
        ("input", TWO, 0, "activations", True),
        ("output", TWO, 0, "activations", True),  # the places of its outputs are not free
        ("output", TWO, 1, "producers", True),
        ("embedding", ONE, 0, "producers", True),
        ("upload", ONE, 0, "parameters", True),
        ("optimizer", ONE, 0, "optimizer", False),
        ("optimizer", ONE, 0, "optimizer", True),
        ("download", ONE, 0, "optimizer", False),  # the update waits for it
        ("update of embedding", ONE, 0, "optimizer", False),  # the embedding waits
        ("partial sums", FUSED, 0, "gradients", True),
    ],
)
def test_a_delay_is_found_as_the_cause(place, plan, device, cause, asynchronous):
    delayed = []

    def causes(pause):
        def slow(where):
            if where.startswith(place) or where.endswith(place):
                delayed.append(where)
                time.sleep(pause)

        return idle(traced(plan, asynchronous=asynchronous, probe=slow), device)

    assert_largest(cause, causes)
    assert delayed


def test_a_caller_that_takes_its_time_is_the_boundary():
    assert_largest("boundary", lambda pause: idle(traced(FUSED, between=5 * pause)))


def test_a_thread_that_takes_its_time_launches_late(monkeypatch):
    issue = Upload.issue

    def causes(pause):
        def slow(upload, after):
            time.sleep(pause)
            issue(upload, after)

        monkeypatch.setattr(Upload, "issue", slow)
        spans = traced(FUSED)
        assert all(span.issued - span.begun > 0.9 * pause for span in spans if span.micro_batch is not None)
        return idle(spans)

    assert_largest("launch", causes)


def test_parameters_are_published_when_the_last_of_them_is():
    with (
        runs.make_store(CFG, torch.float32, asynchronous=True) as store,
        runs.engine_of(store, TWO, tokens=32, trace=True) as engine,
    ):
        worker, board = engine._threads[-1], engine._context.board
        assert isinstance(worker, Worker) and isinstance(board, WatchedBoard)
        upload = worker._upload(0, Plan.parse(TWO).slots(0)[0], 0)  # layers 0 and 1, version -1
        for unit, version, seconds in ((1, -1, 30.0), (2, -1, 20.0), (1, 0, 40.0)):
            board._times[("version", unit), version] = seconds
        assert [upload.arrival(units).published for units in (None, {1}, {2})] == [30, 30, 20]
