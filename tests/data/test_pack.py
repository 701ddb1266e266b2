import logging
from itertools import pairwise
from math import exp
from statistics import NormalDist

import numpy as np
import pytest

from rptrain.data.pack import pack
from rptrain.data.pieces import Unsupervised, piece
from rptrain.kernels.batch import IGNORED
from rptrain.utils.errors import UserError

from .documents import laid_out, stream_of, tokens_of


def some_documents(seed, count, longest):
    """Random documents; each token is unique, so that it can be followed, and supervised by chance."""
    random = np.random.default_rng(seed)
    documents, masks, token = [], [], 1
    for length in random.integers(2, longest, endpoint=True, size=count).tolist():
        mask = random.random(length) < 0.5
        mask[1] = True
        documents.append(list(range(token, token + length)))
        masks.append(mask.tolist())
        token += length
    return documents, masks


def packed(lengths, capacity):
    order, starts = pack(np.array(lengths), capacity)
    return [order[start:end].tolist() for start, end in pairwise(starts)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "longest", "max_length"), [(1, 4, 8), (300, 64, 64), (500, 20, 64), (200, 7, 100)])
@pytest.mark.parametrize("packing", [True, False])
def test_every_token_once_and_labels_within_documents(seed, count, longest, max_length, packing):
    documents, masks = some_documents(seed, count, longest)
    counts = [mask for document_mask in masks for mask in document_mask]
    supervised = {token for token, mask in enumerate(counts, 1) if mask}
    begins = {document[0] for document in documents}
    rows = laid_out(documents, max_length, masks, packing=packing)

    all_ids, all_labels = tokens_of(rows)
    assert sorted(token for row in all_ids for token in row if token) == [t for ids in documents for t in ids]
    for number in range(len(rows)):
        ids, labels, place = all_ids[number], all_labels[number], 0
        lengths = rows.documents(number)
        assert sum(lengths) == max_length
        for length in lengths:
            document, targets = ids[place : place + length], labels[place : place + length]
            place += length
            if document[0] == 0:
                assert set(document) == {0} and set(targets) == {IGNORED} and place == max_length
                continue
            assert document[0] in begins and document == list(range(document[0], document[0] + length))
            expected = [token if token in supervised else IGNORED for token in document[1:]]
            assert targets == [*expected, IGNORED]
        assert rows.supervised[number] == sum(label != IGNORED for label in labels)


@pytest.mark.parametrize("seed", range(5))
def test_little_is_wasted(seed):
    lengths = np.random.default_rng(seed).integers(10, 400, size=2000)
    assert len(packed(lengths, 1024)) <= 1.01 * lengths.sum() / 1024 + 1


@pytest.mark.parametrize(("median", "spread"), [(120, 0.9), (400, 0.8), (300, 1.3)])
@pytest.mark.parametrize("capacity", [2048, 4096])
def test_under_three_percent_is_wasted_on_lengths_as_in_the_wild(median, spread, capacity):
    """Lengths of chats are about lognormal: these are its quantiles. Too long ones are truncated."""
    quantiles = (NormalDist().inv_cdf((number + 0.5) / 3000) for number in range(3000))
    lengths = [min(capacity, max(2, round(median * exp(spread * quantile)))) for quantile in quantiles]
    assert 1 - sum(lengths) / (len(packed(lengths, capacity)) * capacity) < 0.03


def test_best_fit_takes_the_fullest_row_with_room():
    assert packed([6, 5, 3, 2, 4], 10) == [[0, 4], [1, 2, 3]]
    assert packed([10, 10, 1], 10) == [[0], [1], [2]]
    assert packed([4, 4, 4, 4, 2, 2], 6) == [[0], [1], [2, 5], [3, 4]]


def test_supervised_labels_are_the_same_packed_or_padded():
    documents, masks = some_documents(0, 300, 64)
    packed, padded = (laid_out(documents, 64, masks, packing=packing) for packing in (True, False))
    assert len(packed) < len(padded)
    assert packed.supervised.sum() == padded.supervised.sum()
    kept = [sorted(x for row in tokens_of(rows)[1] for x in row if x != IGNORED) for rows in (packed, padded)]
    assert kept[0] == kept[1]


def test_the_seed_decides_who_shares_a_row():
    documents, masks = some_documents(0, 300, 64)
    first, again, other = (laid_out(documents, 64, masks, seed=seed) for seed in (1, 1, 2))
    assert first.content_hash == again.content_hash != other.content_hash
    assert tokens_of(first) == tokens_of(again) != tokens_of(other)


def test_the_hash_tells_labels_and_documents_apart():
    variants = {
        laid_out([ids], 8, [[supervised] * (len(ids) - 1) + [True]]).content_hash
        for ids, supervised in (([1, 2, 3, 4], True), ([1, 2, 3, 4], False), ([1, 2, 3, 4, 0], True))
    }
    assert len(variants) == 3


def test_documents_that_teach_nothing_are_left_out(caplog):
    with caplog.at_level(logging.WARNING):  # the first token is nobody's label
        rows = laid_out([[1, 2, 3], [4, 5, 6]], 8, [[True, False, False], [False, True, False]])
    assert tokens_of(rows)[0] == [[4, 5, 6, 0, 0, 0, 0, 0]]
    assert rows.unsupervised == Unsupervised(1, 2, ("f:1",))
    assert "1 of 2 samples have no supervised token and are left out: f:1" in caplog.text
    empty = laid_out([[], [4, 5, 6], []], 8, [[], [False, True, False], []])
    assert empty.unsupervised == Unsupervised(2, 3, ("f:1", "f:3"))


@pytest.mark.parametrize("masks", [[], [[True, False]], [[False, False, False]] * 3])
def test_nothing_supervised(masks):
    with pytest.raises(UserError, match=r"no token of the data is supervised.*assistant_only_loss = false"):
        laid_out([list(range(len(mask))) for mask in masks], 8, masks)


# Samples that are too long

LONG = list(range(1, 21))  # 20 tokens, of which 3, 4 and 19 are supervised
MASK = [token in (3, 4, 19) for token in LONG]


def of_long(overlong, divisible=False):
    documents, masks = [[31, 32], LONG, [41] * 8], [[True] * 2, MASK, [True] * 8]
    return laid_out(documents, 8, masks, overlong=overlong, divisible=divisible)


def test_truncated(caplog):
    with caplog.at_level(logging.WARNING):
        rows = of_long("truncate")
    assert sorted(tokens_of(rows)[0]) == [[1, 2, 3, 4, 5, 6, 7, 8], [31, 32, 0, 0, 0, 0, 0, 0], [41] * 8]
    assert (rows.trimmed.cut, rows.trimmed.cut_tokens, rows.supervised.sum()) == (1, 12, 2 + 1 + 7)
    assert "truncated 1 sample by 12 tokens in total: longer than 8 tokens" in caplog.text


@pytest.mark.parametrize(("overlong", "divisible"), [("split", False), ("truncate", True), ("error", True)])
def test_divided(caplog, overlong, divisible):
    with caplog.at_level(logging.WARNING):
        rows = of_long(overlong, divisible)
    assert sorted(tokens_of(rows)[0]) == [[1, 2, 3, 4, 5, 6, 7, 8], [17, 18, 19, 20, 31, 32, 0, 0], [41] * 8]
    assert (rows.trimmed.divided, rows.trimmed.cut, rows.supervised.sum()) == (1, 0, 3 + 1 + 7)
    assert "split 1 sample: longer than 8 tokens" in caplog.text


def test_dropped(caplog):
    with caplog.at_level(logging.WARNING):
        rows = of_long("drop")
    assert sorted(tokens_of(rows)[0]) == [[31, 32, 0, 0, 0, 0, 0, 0], [41] * 8]
    assert (rows.trimmed.dropped, rows.trimmed.dropped_tokens) == (1, 20)
    assert "left out 1 sample with 20 tokens in total: longer than 8 tokens" in caplog.text


def test_refused():
    one, two = stream_of([[1] * 4, [2] * 9], name="a"), stream_of([[3] * 8, [4] * 10, [5] * 11], name="b")
    with pytest.raises(UserError) as caught:
        piece([one, two], 8, "error")
    assert str(caught.value).splitlines() == [
        "3 samples are longer than 8 tokens:",
        "  a:2: 9 tokens",
        "  b:2: 10 tokens",
        "  b:3: 11 tokens",
        'Raise data.max_length, or set data.overlong to "truncate", "split" or "drop".',
    ]
    assert len(piece([one, two], 11, "error").lengths) == 5
