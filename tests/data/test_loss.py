"""The loss depends on the samples alone, not on how they share rows, micro-batches and workers."""

import json
from random import Random

import pytest
import torch

from rptrain.config.schema import Data, TrainSet
from rptrain.data.loader import Batches, prepare

from ..engine import plain, runs

LENGTH, SAMPLES = 64, 24
WORDS = ["user", "assistant", "hello", "there", "what", "is", "the", "sum", "of", "two", "numbers", "four"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Conversations, and texts, of which the first token is nobody's label either."""
    random = Random(0)

    def words(most):
        return " ".join(random.choices(WORDS, k=random.randint(1, most)))

    folder, half = tmp_path_factory.mktemp("data"), range(SAMPLES // 2)
    chats = [[{"role": "user", "content": words(4)}, {"role": "assistant", "content": words(8)}] for _ in half]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": words(12)}) for _ in half))
    return [TrainSet(path=str(folder / name)) for name in ("chats.jsonl", "texts.jsonl")]


def loss(sources, tokenizer, *, packing, micro, workers):
    """Of the whole set in one step."""
    rows = prepare(Data(train=sources, max_length=LENGTH, packing=packing), tokenizer)
    assert rows.trimmed.cut == 0 and rows.unsupervised.count == 0
    size = -(-len(rows) // 4) * 4
    batch = Batches(rows, micro, size, 0).batch(0)
    micros = size // micro
    plan = f"F0-1 F2-3 FB4-4 B2-3 B0-1 | N={workers} M={micros} MR={micros}"
    losses, norms, _, _ = runs.run(
        plain.config(vocab_size=320), [batch], plan, asynchronous=False, dtype=torch.float64, max_grad_norm=1.0
    )
    return losses[0], norms[0], len(rows)


def test_the_same_packed_or_padded_in_any_micro_batches_on_any_workers(sources, tokenizer):
    first, norm, packed_rows = loss(sources, tokenizer, packing=True, micro=1, workers=1)
    assert packed_rows < SAMPLES
    for packing in (True, False):
        for micro, workers in ((1, 4), (4, 1), (4, 2)):
            found, found_norm, rows = loss(sources, tokenizer, packing=packing, micro=micro, workers=workers)
            assert (rows < SAMPLES) == packing
            assert found == pytest.approx(first, abs=1e-6) and found_norm == pytest.approx(norm, abs=1e-6)
