"""The bytes of messages that plans count, against those that the engine sends."""

from collections import Counter

import pytest
import torch

from rptrain.engine.distributed.peers import Channel
from rptrain.engine.distributed.traffic import Traffic
from rptrain.engine.optim.gradients import arrival_order

from .. import plain, runs
from .test_exactness import PLAN, SIZES, VOCAB, several


@pytest.mark.parametrize(
    ("world", "tied", "reduce_dtype"), [(2, True, "float32"), (2, True, "bfloat16"), (3, False, "float32")]
)
def test_messages_of_a_step(world, tied, reduce_dtype, monkeypatch):
    """The squares of chunks and the losses are not counted, and small units are not divided evenly."""
    sent: Counter[int] = Counter()
    send = Channel.send

    def counted(self, tensor, to):
        sent[self._peers.rank] += tensor.nbytes
        return send(self, tensor, to)

    monkeypatch.setattr(Channel, "send", counted)
    cfg = plain.config(tie_word_embeddings=tied) | SIZES
    batches = plain.make_batches(2, micro_batches=12, vocab=VOCAB)
    expected = []

    def train(store, plan, *, shared, **options):
        traffic, spec = Traffic(shared.share, torch.float32, reduce_dtype), store.spec
        rows = 0
        for rank in range(world):
            each = shared.share.of(rank)
            numbers = [m for m in range(12) if m % PLAN.replicas in each.groups]
            rows = max(rows, len(batches[0].input_ids[numbers].unique()))
        gradients = sum(traffic.gradients(spec.units[unit]) for unit in arrival_order(spec))
        weights = sum(traffic.weights(spec.units[unit]) for unit in range(len(spec.units)))
        expected.append((gradients + weights, traffic.rows(spec, batches[0].input_ids[0].numel() * 2)))
        return runs.train(store, batches[:1], plan, shared=shared, **options)

    several(world, cfg, {}, train, asynchronous=False, reduce_dtype=reduce_dtype)
    dense, rows = expected[0]
    assert dense * 0.9 <= max(sent.values()) <= (dense + rows) * 1.1
