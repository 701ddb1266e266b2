"""The interface with messages that come late: `LATE=1 python -m pytest -p tests.tui.late tests/tui`, by hand.

Of the messages between widgets one in seven waits for up to 60 ms; LATE is the seed of the chance. What a person sees
and gets must not hang on their order: a machine that trains is a busy one.
"""

import asyncio
import os
import random

import pytest
from textual.message import Message
from textual.message_pump import MessagePump

SHARE = 0.15  # of the messages
DELAY = 0.06  # seconds, at most
LOOKS = 40  # without a change, until a screen is taken to have settled


def pytest_configure() -> None:
    from . import conftest

    conftest.SAME = LOOKS
    seed = os.environ.get("LATE", "0") + os.environ.get("PYTEST_XDIST_WORKER", "")
    chance = random.Random(seed)
    dispatch = MessagePump._dispatch_message

    async def late(pump: MessagePump, message: Message) -> None:
        if chance.random() < SHARE:
            await asyncio.sleep(chance.uniform(0, DELAY))
        await dispatch(pump, message)

    patch = pytest.MonkeyPatch()
    patch.setattr(MessagePump, "_dispatch_message", late)
