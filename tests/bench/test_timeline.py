"""Spans with made-up stamps as values: what belongs to which device, and what each piece waits for."""

from rptrain.bench.idle import Input, Interval, TimedComputation
from rptrain.bench.timeline import Launch, StageLaunches, Transfer, by_stage, lanes, updates
from rptrain.engine.meter import Reading
from rptrain.engine.trace import Arrival, Blocked, ComputeInterval, Copy, Span, Submission
from rptrain.schedule.plan import Plan

F, FB, B = Plan.parse("F0-0 FB1-2 B0-0 | N=2 M=4 MR=2").slots(0)[:3]
LATER = Plan.parse("F0-0 FB1-2 B0-0 | N=2 M=4 MR=2").slots(0)[5]
SUBMISSIONS = [
    Submission(0, ()),
    Submission(20, (Blocked("step", 8, 9), Blocked("loss", 9, 10), Blocked("step", 11, 12))),
]


def at(seconds):
    return lambda: seconds


def piece(launched, start, end, parameters=None):
    return ComputeInterval(launched, at(start), at(end), parameters)


def span(slot, work, begun, issued, *pieces, blocked=(), iteration=0, **waited):
    submission = SUBMISSIONS[iteration]
    return Span(iteration, slot, work, submission, blocked, begun, issued, pieces=[*pieces], **waited)


def test_the_first_piece_waits_for_all_and_a_later_one_for_its_parameters():
    late = span(
        F, 0, 1, 2,
        piece(3, 4, 5, Arrival(1.5, at(3.5))),
        piece(5, 6, 8, Arrival(2.5, at(5.5))),
        copies=[Copy(1, at(1.25), at(1.75))],
        freed=[at(0.5), at(0.75)],
        embedded=0.25,
    )  # fmt: skip
    (lane,) = lanes(["cpu:0"], [late], [])
    assert lane.computations == (
        TimedComputation("F0-0 m0", 4, 5, 0, 3, (Input(1, 1.25, 1.75),), (1.5, 3.5), 0.75, 0.25),
        TimedComputation("F0-0 m0", 6, 8, 0, 5, (), (2.5, 5.5), None, 0.25),
    )
    assert lane.issuing == (("F0-0 m0", 1, 2),)


def test_devices_have_their_own_spans_copies_and_threads():
    readings = [
        Reading("cpu:1 param_upload", 1, "upload", 30, at(1), at(2)),
        Reading("cpu:0", 1, "download", 10, at(3), at(4)),
        Reading("cpu:1 compute", 1, "forward", 0, at(3), at(4)),
        Reading("optimizer", 1, "update", 0, at(5), at(7)),
    ]
    waits = [Blocked("boundary", 0, 1), Blocked("version", 2, 3), Blocked("grad", 4, 5), Blocked("loss", 6, 7)]
    spans = [
        span(F, 0, 1, 2, piece(1, 2, 3)),
        span(FB, 0, 1, 2, piece(1, 3, 4), blocked=(*waits[:2],)),
        span(FB, 1, 3, 6, piece(1, 4, 5), blocked=(*waits[2:],), iteration=1),
    ]
    first, second = lanes(["cpu:0", "cpu:1"], spans, readings)
    assert [c.name for c in first.computations] == ["F0-0 m0"]
    assert [(c.name, c.submitted) for c in second.computations] == [("FB1-2 m0", 0), ("FB1-2 m1", 20)]
    assert first.transfers == (Transfer("download", 3, 4, 10),)
    assert second.transfers == (Transfer("upload", 1, 2, 30),)
    assert first.host.blocked == []
    assert second.host.blocked == [
        Interval("producers", 0, 1),
        Interval("optimizer", 2, 3),
        Interval("gradients", 4, 5),
    ]
    assert first.host.caller == second.host.caller == [Interval("optimizer", 8, 9), Interval("optimizer", 11, 12)]
    assert [*updates(readings)] == [(5, 7)]


def test_what_waits_for_gradients():
    spans = [
        span(FB, "zeroing", 0, 1, piece(0, 0, 1)),
        span(FB, 0, 0, 1, piece(0, 1, 2)),
        span(LATER, 2, 0, 1, piece(0, 5, 6), piece(6, 7, 8)),
        span(LATER, 3, 0, 1, piece(0, 8, 9)),
    ]
    assert (LATER.round, LATER.device, LATER.stage.backward) == (1, 1, True)
    _, lane = lanes(["cpu:0", "cpu:1"], spans, [])
    assert [(c.name, c.rest) for c in lane.computations] == [
        ("FB1-2 zeroing", "gradients"),
        ("FB1-2 m0", "other"),
        ("B0-0 m2", "gradients"),
        ("B0-0 m2", "other"),
        ("B0-0 m3", "other"),
    ]


def test_launching_is_what_a_thread_does_while_it_is_not_blocked():
    spans = [
        span(FB, "zeroing", 0, 10, piece(0, 0, 50)),
        span(FB, 0, 10, 15, piece(0, 100, 104), piece(0, 110, 113)),
        span(FB, 1, 20, 29, piece(0, 120, 125), blocked=(Blocked("boundary", 12, 14),), waited=2),
        span(B, "zeroing", 30, 40, piece(0, 200, 201), blocked=(Blocked("version", 28, 33),)),
    ]
    _, lane = lanes(["cpu:0", "cpu:1"], spans, [])
    assert lane.launches == (Launch("FB1-2", 3, 7), Launch("FB1-2", 7, 5))


def test_launches_by_stage():
    found = by_stage([Launch("F0-0", 1, 10), Launch("B0-0", 5, 20), Launch("F0-0", 4, 14), Launch("F0-0", 2, 11)])
    assert found == [StageLaunches("F0-0", 2, 11), StageLaunches("B0-0", 5, 20)]
