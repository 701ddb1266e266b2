"""Values that processes exchange through a channel. Here they are threads with connections of their own."""

import threading

import pytest
import torch

from rptrain.engine.distributed import peers as module
from rptrain.engine.distributed import rendezvous
from rptrain.engine.distributed.peers import PeerLost
from rptrain.utils.liveness import last_progress
from tests import run_tools as tools

from .test_exactness import together


def test_all_processes_get_the_values_of_all_in_order():
    values = [None, "ü" * 1000, {"a": [1, 2.5, True]}]

    def call(peers):
        channel = peers.channel()
        first = channel.gather(values[peers.rank])
        return first, channel.gather(peers.rank), channel.gather(values[-peers.rank])

    assert together(3, call) == [(values, [0, 1, 2], [values[0], values[2], values[1]])] * 3


def test_large_messages_are_divided_among_connections(monkeypatch):
    monkeypatch.setattr(module, "DIVIDED", 1000)
    sizes = (1001, 999, 1000, 3, 4000)  # of messages that overtake each other, were they on one connection too few
    used: list[int] = []

    def call(peers):
        channel = peers.channel(3)
        if peers.rank == 1:
            messages = [message for size in sizes for message in channel.send(values(size), 0)]
        else:
            messages, places = [], [torch.empty(size, dtype=torch.uint8) for size in sizes]
            for place in places:
                messages += channel.receive(place, 1)
            used.extend(len(message._works) for message in messages)
        for message in messages:
            message.wait()
        return peers.rank == 1 or all(place.equal(values(len(place))) for place in places)

    def values(size):
        return torch.arange(size).to(torch.uint8)

    assert together(2, call) == [True] * 2
    assert used == [3, 1, 3, 1, 3]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("broken"), "has failed: OSError: broken"),
        (torch.AcceleratorError("CUDA error: device lost\nFor debugging"), "has failed: CUDA error: device lost"),
        (KeyboardInterrupt(), "was interrupted"),
    ],
    ids=["failed", "lost-its-gpu", "interrupted"],
)
def test_a_process_that_does_not_answer_does_not_hold_up_the_others(monkeypatch, error, message):
    """Its connections stay open, so no message of theirs fails."""
    monkeypatch.setattr(module, "BEAT", 0.1)
    ended = threading.Barrier(3, timeout=tools.PATIENCE)

    def call(peers):
        channel = peers.channel()
        if peers.rank == 1:
            peers.fail(error)
        else:
            with pytest.raises(PeerLost, match=f"process 1 on .* {message}: the step cannot be"):
                channel.gather("value")
        ended.wait()
        return True

    assert together(3, call) == [True] * 3


def test_what_is_on_its_way_arrives_although_its_sender_has_ended(monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL", tools.PATIENCE)
    arrived = threading.Event()

    def lost():
        arrived.set()
        return PeerLost("process 1 has ended")

    assert rendezvous.within(tools.PATIENCE, lambda: arrived.wait() and "value", lost) == "value"


def test_to_wait_for_others_is_progress():
    """Otherwise the watchdog would end a process that waits for longer than engine.stall_timeout."""
    last_progress.value = 0
    with pytest.raises(RuntimeError, match="no answer within"):
        rendezvous.within(0.01, threading.Event().wait)
    assert last_progress.value > 0
