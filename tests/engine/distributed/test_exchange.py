"""The order of messages of a process with gradients."""

import threading

from rptrain.engine.distributed.exchange import GradientExchange
from rptrain.engine.distributed.peers import Channel

from .. import plain, runs
from .test_exactness import SIZES, VOCAB, several


def test_receives_begin_before_sends(monkeypatch):
    """Otherwise data of a unit flows in one direction first, and then in the other."""
    calls = threading.local()
    first = []

    def logged(name):
        call = getattr(Channel, name)

        def log(self, *arguments):
            getattr(calls, "names", []).append(name)
            return call(self, *arguments)

        return log

    reduce = GradientExchange.reduce

    def one(self, unit, grads):
        calls.names = []
        reduce(self, unit, grads)
        if {*calls.names} == {"send", "receive"}:  # a small unit may be in one part
            first.append(calls.names[0])

    for name in ("send", "receive"):
        monkeypatch.setattr(Channel, name, logged(name))
    monkeypatch.setattr(GradientExchange, "reduce", one)

    def train(store, plan, **options):
        return runs.train(store, plain.make_batches(1, micro_batches=12, vocab=VOCAB), plan, **options)

    several(2, plain.config(tie_word_embeddings=True) | SIZES, {}, train, asynchronous=False)
    assert {*first} == {"receive"}
