import logging

import numpy as np
import pytest

from rptrain.data.batch import IGNORED
from rptrain.data.packing import Documents, pack
from rptrain.data.rows import build
from rptrain.errors import UserError


def some_documents(seed, count, longest, max_length):
    """Random documents; each token is unique, so that it can be followed, and supervised by chance."""
    random = np.random.default_rng(seed)
    documents, token = Documents(max_length), 1
    for length in random.integers(2, longest, endpoint=True, size=count).tolist():
        supervised = random.random(length) < 0.5
        supervised[1] = True
        documents.add(list(range(token, token + length)), supervised.tolist())
        token += length
    return documents


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "longest", "max_length"), [(1, 4, 8), (300, 64, 64), (500, 20, 64), (200, 7, 100)])
@pytest.mark.parametrize("packing", [True, False])
def test_every_token_once_and_labels_within_documents(seed, count, longest, max_length, packing):
    documents = some_documents(seed, count, longest, max_length)
    supervised = documents.supervised
    begins = set((np.cumsum(documents.lengths) - documents.lengths + 1).tolist())  # the first tokens
    rows = build(documents, packing=packing, pad_id=0)

    tokens = rows.input_ids[rows.input_ids != 0]
    assert sorted(tokens.tolist()) == documents.ids.tolist()
    for number in range(len(rows)):
        ids, labels, place = rows.input_ids[number].tolist(), rows.labels[number].tolist(), 0
        lengths = rows.documents(number)
        assert sum(lengths) == max_length
        for length in lengths:
            document, targets = ids[place : place + length], labels[place : place + length]
            place += length
            if document[0] == 0:
                assert set(document) == {0} and set(targets) == {IGNORED} and place == max_length
                continue
            assert document[0] in begins and document == list(range(document[0], document[0] + length))
            expected = [token if supervised[token - 1] else IGNORED for token in document[1:]]
            assert targets == [*expected, IGNORED]
        assert rows.supervised[number] == sum(label != IGNORED for label in labels)


@pytest.mark.parametrize("seed", range(5))
def test_little_is_wasted(seed):
    lengths = np.random.default_rng(seed).integers(10, 400, size=2000)
    rows = pack(lengths, 1024)
    assert len(rows) <= 1.01 * lengths.sum() / 1024 + 1


def test_best_fit_takes_the_fullest_row_with_room():
    assert pack(np.array([6, 5, 3, 2, 4]), 10) == [[0, 4], [1, 2, 3]]
    assert pack(np.array([10, 10, 1]), 10) == [[0], [1], [2]]


def test_packing_is_fast():
    lengths = np.random.default_rng(0).integers(10, 2000, size=100_000)
    assert sum(map(len, pack(lengths, 8192))) == len(lengths)


def test_supervised_labels_are_the_same_packed_or_padded():
    documents = some_documents(0, 300, 64, 64)
    packed, padded = (build(documents, packing=packing, pad_id=0) for packing in (True, False))
    assert len(packed) < len(padded)
    assert packed.supervised.sum() == padded.supervised.sum()
    kept = [sorted(rows.labels[rows.labels != IGNORED].tolist()) for rows in (packed, padded)]
    assert kept[0] == kept[1]


def test_the_seed_decides_who_shares_a_row():
    documents = some_documents(0, 300, 64, 64)
    first, again, other = (build(documents, packing=True, pad_id=0, seed=seed) for seed in (1, 1, 2))
    assert first.content_hash == again.content_hash != other.content_hash
    assert first.input_ids.equal(again.input_ids) and not first.input_ids.equal(other.input_ids)


def test_the_hash_tells_labels_and_documents_apart():
    def hashed(*parts, supervised=True):
        documents = Documents(8)
        for part in parts:
            documents.add(part, [supervised] * (len(part) - 1) + [True])
        return build(documents, packing=True, pad_id=0).content_hash

    variants = {hashed([1, 2, 3, 4]), hashed([1, 2, 3, 4], supervised=False), hashed([1, 2, 3, 4, 0])}
    assert len(variants) == 3


def test_cut_documents_are_counted(caplog):
    documents = Documents(8)
    documents.add(list(range(20)), [True] * 20)
    documents.add(list(range(20)), [True] * 20, divisible=True)
    documents.add(list(range(8)), [True] * 8)
    assert documents.lengths.tolist() == [8, 8, 8, 4, 8] and len(documents.ids) == 36
    with caplog.at_level(logging.WARNING):
        documents.warn()
    assert "1 conversations lost their end: longer than 8 tokens" in caplog.text
    assert "1 texts were divided" in caplog.text


def test_documents_that_teach_nothing_are_left_out(caplog):
    documents = Documents(8)
    documents.add([1, 2, 3], [True, False, False])  # the first token is nobody's label
    documents.add([4, 5, 6], [False, True, False])
    with caplog.at_level(logging.WARNING):
        rows = build(documents, packing=True, pad_id=0)
    assert rows.input_ids.tolist() == [[4, 5, 6, 0, 0, 0, 0, 0]]
    assert "1 documents without a supervised token are left out" in caplog.text


@pytest.mark.parametrize("masks", [[], [[True, False]], [[False, False, False]] * 3])
def test_nothing_supervised(masks):
    documents = Documents(8)
    for mask in masks:
        documents.add(list(range(len(mask))), mask)
    with pytest.raises(UserError, match=r"no token of the data is supervised.*assistant_only_loss = false"):
        build(documents, packing=True, pad_id=0)
