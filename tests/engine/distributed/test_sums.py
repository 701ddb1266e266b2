"""Gradients that processes exchange in bfloat16: who rounds what, and how many bytes are sent."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rptrain.engine import optimizer as worker
from rptrain.engine.distributed import exchange, sums
from rptrain.engine.distributed.sums import SumChannel
from rptrain.engine.memory.moments import CHUNK
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.embedding_grads import CpuRows
from rptrain.engine.optim.gradients import Gradients, arrival_order
from rptrain.engine.optim.loss_scale import LossScale
from rptrain.engine.optim.row_gradients import RowGradients
from rptrain.engine.tree import subtrees
from tests.cases import BOTH, UPDATES

from .. import plain, runs
from .test_exactness import KINDS, PLAN, SIZES, VOCAB, alone, several, together

STEPS = 3
ODD = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, float("inf"), -float("inf"), float("nan"), 1e-40, -2.5]


@pytest.fixture(autouse=True)
def small_messages(monkeypatch):
    """Several for each part of a unit, and more than are received at a time; several blocks for each message."""
    monkeypatch.setattr(exchange, "PIECE", CHUNK // 4)
    monkeypatch.setattr(sums, "BLOCK", CHUNK // 10)


def test_values_are_rounded_on_their_way(monkeypatch):
    """Also those that are infinite or NaN; in blocks that do not divide the message, on several threads."""
    monkeypatch.setattr(sums, "BLOCK", 3)
    messages = [torch.tensor([*ODD, 1.0])[:count] for count in range(1, len(ODD) + 2)]

    def call(peers):
        channel, other = peers.channel(), 1 - peers.rank
        sent, received = counted(channel), [torch.zeros_like(values) for values in messages]
        with ThreadPoolExecutor(2) as pool:
            each = SumChannel(channel, "bfloat16", pool, 2)
            begun = [message for place in received for message in each.receive(place, other)]
            begun += [message for values in messages for message in each.send(values.clone(), other)]
            for message in begun:
                message.wait()
        return received, sent

    for received, sent in together(2, call):
        expected = [values.to(torch.bfloat16).float() for values in messages]
        torch.testing.assert_close(received, expected, rtol=0, atol=0, equal_nan=True)
        assert sent == {torch.bfloat16: 2 * sum(map(len, messages))}


@pytest.mark.long
@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 3, 4])
@BOTH
@pytest.mark.parametrize("kind", ["tied", "lora", "untied", "bf16", "qwen3-moe", "embedding-saved"])
def test_equals_a_plain_sum_with_the_same_rounding(monkeypatch, kind, asynchronous, world):
    """To the bit, with half the bytes, and with losses close to those of float32."""
    changes, of_store = KINDS[kind]
    cfg = plain.config(tie_word_embeddings=True) | changes | SIZES
    batches = plain.make_batches(STEPS, micro_batches=12, vocab=VOCAB)
    options = {"asynchronous": asynchronous, "max_grad_norm": 1.0, "weight_decay": 0.1}

    def train(store, plan, *, shared=None, **options):
        sent = None if shared is None else counted(shared.gradients)
        return *runs.train(store, batches, plan, shared=shared, **options)[:3], sent, store.spec

    exact = several(world, cfg, of_store, train, **options)
    found = several(world, cfg, of_store, train, reduce_dtype="bfloat16", **options)
    monkeypatch.setattr(worker, "Gradients", rounding(world))
    losses, norms, weights, *_ = alone(cfg, of_store, train, **options)
    assert losses == pytest.approx(exact[0][0], rel=5e-3) and norms != exact[0][1]
    for rank, (one, other) in enumerate(zip(found, exact, strict=True)):
        assert one[:2] == (losses, norms)
        assert all(torch.equal(one[2][name], weights[name]) for name in weights)
        sent, before, spec = one[3], other[3], other[4]
        assert before[torch.float32] - sent[torch.float32] == 2 * sent[torch.bfloat16]  # the rest are losses
        assert before[torch.float64] == sent[torch.float64]
        if not spec.units[0].trainable:
            share = Share(rank, world, PLAN.replicas)
            parts = [share.of(r).part(spec, unit) for r in range(world) if r != rank for unit in arrival_order(spec)]
            elements = sum(part.stop - part.start for part in parts) * len(subtrees(share.groups, PLAN.replicas))
            assert sent[torch.bfloat16] == STEPS * elements * 2


@pytest.mark.long
@UPDATES
def test_skips_the_steps_that_overflow(monkeypatch, asynchronous):
    cfg, batches = plain.config(tie_word_embeddings=True) | SIZES, plain.make_batches(5, micro_batches=12, vocab=VOCAB)
    options = {"asynchronous": asynchronous, "rate": 1e-2, "loss_scale": LossScale.start(2.0**17, 1)}

    def train(store, plan, **options):
        return runs.train(store, batches, plan, **options)[:3]

    rounded = several(2, cfg, {"dtype": torch.float16}, train, reduce_dtype="bfloat16", **options)
    monkeypatch.setattr(worker, "Gradients", rounding(2))
    losses, norms, weights = alone(cfg, {"dtype": torch.float16}, train, **options)
    assert len({norm < float("inf") for norm in norms}) == 2, norms
    for found in rounded:
        assert repr(found[:2]) == repr((losses, norms))  # the norm of a skipped step may be NaN
        assert all(torch.equal(found[2][name], weights[name]) for name in weights)


def counted(channel):
    """The bytes that a channel will have sent, by type."""
    sent, send = Counter(), channel.send

    def count(tensor, to):
        sent[tensor.dtype] += tensor.nbytes
        return send(tensor, to)

    channel.send = count
    return sent


def rounding(world):
    """Gradients of one process, which sums those of the groups as `world` processes do that round what they send."""
    shares = [Share(rank, world, PLAN.replicas) for rank in range(world)]
    process = [share.rank for share in shares for _ in share.groups]

    def total(values, owner, start=0, width=8):
        """The sum in the owner of a node of the tree; None without values. Nodes of others, in others, are rounded."""
        if width == 1 or start >= PLAN.replicas:
            return values[start] if start < PLAN.replicas else None
        half, within = width // 2, {*process[start : start + width]}
        found = []
        for first in (start, start + half):
            value, processes = total(values, owner, first, half), {*process[first : first + half]}
            if value is not None and len(within) > 1 and len(processes) == 1 and processes != {owner}:
                value = value.to(torch.bfloat16).float()
            found.append(value)
        left, right = found
        return left if right is None else right if left is None else left + right

    class Rows(RowGradients):
        def apply(self):
            rows, width = self._rows[self._applied : self._whole].tolist(), self._table.shape[1]
            parts = [share.part(self.spec, 0) for share in shares]
            for place, row in enumerate(rows, start=self._applied):
                (owner,) = [rank for rank, part in enumerate(parts) if part.start <= row * width < part.stop]
                sources = self._sources[:, place].tolist()
                value = total([None if source < 0 else self._sums[source, :width] for source in sources], owner)
                if row != self._padding_row:
                    self._table[row] += value
            self._applied = self._whole

    class Rounding(Gradients):
        def _add(self, unit, grads):
            for share in shares:
                part = share.part(self._context.store.spec, unit)
                grads[0][part] = total([grad[part] for grad in grads], share.rank)
            return self._adam.squares(grads[0]) if unit else torch.empty(0)

        def _row_gradients(self):
            store = self._context.store
            rows = Rows(store.units[0], store.spec, store.layout, CpuRows(self._adam.pool, self._adam.threads))
            rows.spec = store.spec
            return rows

    return Rounding
