"""When the next piece of input is handed out."""

import asyncio

from rptrain.tui.turns import ROUNDS, _rest


def test_input_does_not_wait_for_a_task_that_never_rests():
    rounds = 0

    async def never_rests() -> None:
        nonlocal rounds
        while rounds < 10 * ROUNDS:
            rounds += 1
            await asyncio.sleep(0)

    async def resting() -> None:
        task = asyncio.create_task(never_rests())
        await _rest()
        assert not task.done()
        await task

    asyncio.run(resting())


def test_input_waits_for_all_that_is_ready_in_the_event_loop():
    """It fails if the loops of asyncio lose the name by which this is known."""

    async def resting() -> None:
        left = 50

        def again() -> None:
            nonlocal left
            left -= 1
            if left:
                asyncio.get_running_loop().call_soon(again)

        again()
        await _rest()
        assert left == 0

    asyncio.run(resting())
