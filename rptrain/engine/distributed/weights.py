"""The thread that sends updated weights to the other processes, and receives theirs."""

import queue
import threading
from collections.abc import Callable, Sequence

from rptrain.engine.context import Context
from rptrain.engine.distributed.peers import Channel
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.optim.gradients import label
from rptrain.utils.native import finish


class WeightExchange:
    """Takes the order in which a step updates its units, and waits for ("updated", unit) of each in turn: the threads
    of the optimizer may end in another order. Calls `publish` with the unit and the version once it is complete.
    """

    def __init__(
        self, context: Context, adam: CpuAdam, share: Share, channel: Channel, publish: Callable[[int, int], None]
    ) -> None:
        self._context, self._adam, self._share, self._channel = context, adam, share, channel
        self._publish = publish
        self._where = "waiting"
        self._queue: queue.SimpleQueue[tuple[int, Sequence[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=context.guard, args=(lambda: self._where, self._main), name="weight exchange", daemon=True
        )
        self._thread.start()

    def submit(self, version: int, order: Sequence[int]) -> None:
        self._queue.put((version, order))

    def end(self) -> Sequence[threading.Thread]:
        """Ends the thread, which is returned, after what was submitted."""
        self._queue.put(None)
        return (self._thread,)

    def _main(self) -> None:
        context, store = self._context, self._context.store
        while (item := self._queue.get()) is not None:
            version, order = item
            for unit in order:
                state = store.units[unit]
                self._where = f"exchanging weights: {label(state.unit.name)}"
                context.board.wait(("updated", unit), version - 1)
                params, spec = state.params[state.written], store.spec
                self._channel.share([params[self._share.of(r).part(spec, unit)] for r in range(self._share.world)])
                if context.aborted():  # and the engine may be closed
                    return
                finish(self._adam.pool, state.wire_writes(state.spare))
                self._publish(unit, version)
            self._where = "waiting"
