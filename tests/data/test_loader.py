import copy
import json

import pytest
import torch

from rptrain.config.schema import Data, TrainSet
from rptrain.data.loader import Batches, load_tokenizer, prepare
from rptrain.data.progress import ReadProgress
from rptrain.kernels.batch import IGNORED
from rptrain.utils.errors import UserError

from .documents import laid_out, tokens_of

LENGTH = 12


@pytest.fixture(scope="module")
def rows():
    """Rows of two or three documents."""
    return laid_out([[token] * (3 + token % 3) for token in range(1, 27)], LENGTH)


def same(one, other):
    return (
        one.input_ids.equal(other.input_ids)
        and one.positions.equal(other.positions)
        and one.labels.equal(other.labels)
        and one.documents == other.documents
    )


def test_an_epoch_takes_every_row_once(rows):
    batches = Batches(rows, 2, 4, seed=3)
    assert batches.steps_per_epoch == -(-len(rows) // 4)
    for epoch in range(3):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        taken = torch.cat([batches.batch(step).input_ids.view(-1, LENGTH) for step in steps])
        taken = taken[taken.any(1)]
        assert sorted(taken.tolist()) == sorted(tokens_of(rows)[0])
        total = sum(batches.batch(step).supervised for step in steps)
        assert total == rows.supervised.sum()


def test_the_order_depends_on_seed_and_epoch_alone(rows):
    batches = Batches(rows, 2, 4, seed=3)
    orders = {tuple(batches.order(epoch).tolist()) for epoch in range(4)}
    assert len(orders) == 4
    assert Batches(rows, 1, 2, seed=3).order(1).tolist() == batches.order(1).tolist()
    assert Batches(rows, 2, 4, seed=4).order(1).tolist() != batches.order(1).tolist()


def test_the_order_is_the_same_for_ever(rows):
    assert Batches(rows, 1, 1, seed=3).order(2).tolist() == [4, 0, 8, 5, 3, 9, 7, 6, 1, 2]


def test_a_batch_is_known_by_its_step(rows):
    forwards, backwards = Batches(rows, 2, 4, seed=3), Batches(rows, 2, 4, seed=3)
    steps = list(range(12))
    late = {step: backwards.batch(step) for step in reversed(steps)}
    assert all(same(forwards.batch(step), late[step]) for step in steps)
    assert same(Batches(rows, 2, 4, seed=3).batch(11), late[11])


def test_a_batch_says_what_its_random_numbers_follow_from(rows):
    found = Batches(rows, 2, 4, seed=3).batch(11)
    assert (found.seed, found.step) == (3, 11)


def test_micro_batches_split_the_same_batch(rows):
    whole, halves = Batches(rows, 4, 4, seed=3).batch(1), Batches(rows, 2, 4, seed=3).batch(1)
    assert whole.input_ids.shape == (1, 4 * LENGTH) and halves.input_ids.shape == (2, 2 * LENGTH)
    assert whole.input_ids.flatten().equal(halves.input_ids.flatten())
    assert whole.documents[0] == halves.documents[0] + halves.documents[1]
    assert whole.supervised == halves.supervised and halves.sequences == 2 and halves.length == LENGTH


def test_documents_positions_and_labels_agree(rows):
    batches = Batches(rows, 2, 4, seed=3)
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        assert batch.input_ids.dtype == batch.positions.dtype == batch.labels.dtype == torch.int64
        assert batch.supervised == (batch.labels != IGNORED).sum()
        for micro, lengths in enumerate(batch.documents):
            assert sum(lengths) == 2 * LENGTH
            place = 0
            for length in lengths:
                part = slice(place, place + length)
                assert batch.positions[micro, part].tolist() == list(range(length))
                assert len(batch.input_ids[micro, part].unique()) == 1  # a document of the fixture is one token
                assert batch.labels[micro, place + length - 1] == IGNORED
                assert place // LENGTH == (place + length - 1) // LENGTH
                place += length


@pytest.mark.parametrize("size", [4, 8])
def test_only_the_last_micro_batch_is_padded(size):
    rows = laid_out([[token] * LENGTH for token in range(1, 14)], LENGTH)
    batches = Batches(rows, 2, size, seed=3)
    last = batches.batch(batches.steps_per_epoch - 1)
    assert len(rows) == 13 and last.full == size // 2
    assert len(last.input_ids) == -(-(13 % size) // 2) and last.tokens == last.input_ids.numel()
    tail = slice(-LENGTH, None)
    assert not last.input_ids.flatten()[tail].any()
    assert last.labels.flatten()[tail].eq(IGNORED).all()
    assert last.documents[-1][-1] == LENGTH


def test_fewer_rows_than_a_batch(rows):
    batch, count = Batches(rows, 8, 64, seed=0).batch(5), -(-len(rows) // 8)
    assert batch.full == 8 > count and batch.supervised == rows.supervised.sum()
    assert batch.input_ids.shape == (count, 8 * LENGTH) and len(batch.documents) == count


@pytest.mark.parametrize(("micro", "whole"), [(3, 4), (8, 4), (0, 4), (1, 0)])
def test_batch_sizes_that_do_not_divide(rows, micro, whole):
    with pytest.raises(UserError, match="must be a multiple of"):
        Batches(rows, micro, whole, seed=0)


def test_prepare_joins_sources(tokenizer, tmp_path):
    chat, text = tmp_path / "chat.jsonl", tmp_path / "words.txt"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}]
    chat.write_text(json.dumps({"messages": messages}))
    text.write_text("one two three")
    sources = [TrainSet(path=str(chat)), TrainSet(path=str(text), format="text")]
    rows = prepare(Data(train=sources, max_length=64), tokenizer)
    assert len(rows) == 1
    content = tokenizer.decode([token for token in tokens_of(rows)[1][0] if token != IGNORED])
    assert sorted(content.replace("<|im_end|>", "<|endoftext|>").split("<|endoftext|>")) == sorted(
        ["", "hi there", "ne two three"]
    )
    everything = prepare(Data(train=sources, max_length=64, assistant_only_loss=False), tokenizer)
    assert everything.supervised.sum() > rows.supervised.sum()
    apart = prepare(Data(train=sources, max_length=64, packing=False), tokenizer)
    assert len(apart) == 2 and apart.supervised.sum() == rows.supervised.sum()


def test_random_rows_need_no_tokenizer():
    rows = prepare(Data(train=[TrainSet(path="builtin:random")], max_length=32), vocab_size=50)
    assert len(rows) == 256 and rows.length == 32 and rows.largest == 49
    assert rows.supervised.tolist() == [31] * 256 and rows.documents(7) == [32]
    again = prepare(Data(train=[TrainSet(path="builtin:random")], max_length=32), vocab_size=50)
    assert again.content_hash == rows.content_hash


@pytest.mark.parametrize(("vocab_size", "expected"), [(13, 0), (12, 0), (14, 13), (None, 13)])
def test_padding_is_within_the_vocabulary(tokenizer, vocab_size, expected):
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.convert_ids_to_tokens(13)
    rows = prepare(
        Data(train=[TrainSet(path="builtin:tasks", split="test")], max_length=64), padded, vocab_size=vocab_size
    )
    assert rows.pad_id == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (TrainSet(path="builtin:random"), "needs the vocabulary's size"),
        (TrainSet(path="builtin:tasks"), "needs the model's tokenizer"),
        (TrainSet(path="rows.jsonl"), "needs the model's tokenizer"),
    ],
)
def test_what_a_source_needs(source, reason):
    with pytest.raises(UserError, match=reason):
        prepare(Data(train=[source], max_length=32))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (TrainSet(path="builtin:tasks", split="dev"), '"train" and "test", not \'dev\''),
        (TrainSet(path="builtin:other"), "the built-in sets are builtin:tasks and builtin:random"),
        (TrainSet(path=__file__, split="test"), "a file has no split"),
        (TrainSet(path="missing.jsonl"), "no such data file"),
    ],
)
def test_sources_that_do_not_exist(tokenizer, source, reason):
    with pytest.raises(UserError, match=reason):
        prepare(Data(train=[source], max_length=32), tokenizer)


def test_tokenizers_that_cannot_be_loaded(tmp_path):
    with pytest.raises(UserError, match="no such model directory"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(UserError, match="there is no tokenizer; copy the model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="transformers cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_files_that_are_not_cached_are_reported(tmp_path, tokenizer, monkeypatch):
    readings = list[ReadProgress]()
    monkeypatch.setattr(ReadProgress, "show", lambda reading, phase: readings.append(reading))

    def read() -> list[tuple[str, int, int, int]]:
        """The files that were read to their end, with their number and their rows."""
        readings.clear()
        source = TrainSet(path=str(tmp_path / "data"))
        kept = tmp_path / "kept"
        prepare(Data(train=[source], max_length=64, cache_dir=str(kept)), tokenizer)
        return [(one.file, one.number, one.files, one.rows) for one in readings if one.done]

    (tmp_path / "data").mkdir()
    row = json.dumps({"text": "Two and two is four."}) + "\n"
    (tmp_path / "data" / "a.jsonl").write_text(row * 3)
    assert read() == [("a.jsonl", 1, 1, 3)]
    (tmp_path / "data" / "b.jsonl").write_text(row * 4)
    assert read() == [("b.jsonl", 2, 2, 4)]
    assert read() == []
