"""How often each set is taken."""

from collections import Counter

import pytest

from rptrain.data.loader import Batches
from rptrain.data.pieces import piece
from rptrain.data.sequences import build

from .documents import laid_out, stream_of

LENGTH = 8


def weighted(*sets):
    """Rows of sets of documents, each given as a token, how many, and the weight; two documents fill a row."""
    streams = [stream_of([[token] * 4] * count) for token, count, _ in sets]
    weights = [weight for _, _, weight in sets]
    return build(streams, piece(streams, LENGTH, "error"), packing=True, pad_id=0, weights=weights)


def taken(batches, epoch):
    """How many rows of each token an epoch takes."""
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    rows = [row for step in steps for row in batches.batch(step).input_ids.view(-1, LENGTH).tolist()]
    assert all(len(set(row)) == 1 for row in rows), "sets of other weights share no row"
    return Counter(row[0] for row in rows if row[0])


def test_a_weight_is_how_often_a_set_is_taken_in_an_epoch():
    batches = Batches(weighted((1, 40, 1.0), (2, 20, 2.5), (3, 80, 0.25)), 2, 4, seed=3)
    for epoch in range(3):
        assert taken(batches, epoch) == {1: 20, 2: 25, 3: 10}


@pytest.mark.parametrize("weight", [0.25, 0.3, 1.7, 3.0])
def test_no_row_is_taken_again_before_all_were(weight):
    batches = Batches(weighted((1, 40, 1.0), (2, 40, weight)), 1, 1, seed=3)
    counts = Counter()
    for epoch in range(7):
        order = batches.order(epoch)
        assert sorted(row for row in order.tolist() if row < 20) == list(range(20))
        counts.update(row for row in order.tolist() if row >= 20)
        assert max(counts.values()) - min(counts[row] for row in range(20, 40)) <= 1
    assert counts.total() == 7 * round(20 * weight)


def test_a_batch_is_known_by_its_step():
    rows = weighted((1, 40, 1.0), (2, 40, 0.3))
    forwards, late = Batches(rows, 1, 2, seed=3), Batches(rows, 1, 2, seed=3)
    steps = range(3 * forwards.steps_per_epoch)
    expected = [forwards.batch(step).input_ids for step in steps]
    assert all(late.batch(step).input_ids.equal(expected[step]) for step in reversed(steps))
    assert forwards.order(0).tolist() != forwards.order(1).tolist()
    assert Batches(rows, 1, 2, seed=4).order(0).tolist() != late.order(0).tolist()


def test_sets_of_one_weight_are_as_if_there_were_no_weights():
    parts = [stream_of([[1] * 3] * 9), stream_of([[2] * 5] * 4)]
    joined = build(parts, piece(parts, LENGTH, "error"), packing=True, pad_id=0, weights=[2.0, 2.0])
    alone = laid_out([[1] * 3] * 9 + [[2] * 5] * 4, LENGTH)
    assert joined.take(range(len(joined)))[0].equal(alone.take(range(len(alone)))[0])
    assert Batches(joined, 1, 1, 0).steps_per_epoch == 2 * Batches(alone, 1, 1, 0).steps_per_epoch


def test_a_set_of_little_weight_is_taken_at_all():
    batches = Batches(weighted((1, 40, 1.0), (2, 8, 0.01)), 1, 1, seed=0)
    assert sum(row >= 20 for epoch in range(4) for row in batches.order(epoch).tolist()) == 4
