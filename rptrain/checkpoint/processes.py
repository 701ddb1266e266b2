"""Write a directory from several processes, which share a file system. A single process is the case of one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rptrain.checkpoint.atomic_dir import Aside, Damaged, written_aside
from rptrain.engine.distributed.peers import Peers
from rptrain.utils.errors import describe
from rptrain.utils.text import as_message


class OtherFailed(OSError):
    """Another process has failed."""


@dataclass(frozen=True)
class Processes:
    """The processes that train a model, of which this is number `rank`.

    All of them call `gather`, each with a value for JSON. It waits for all and returns their values by rank. It raises
    an error if a process is lost. `name` describes a process in messages. One thread at a time uses this, and the order
    of the calls is the same in all processes.
    """

    rank: int
    gather: Callable[[Any], Sequence[Any]]
    name: Callable[[int], str] = "process {}".format

    @classmethod
    def of(cls, peers: Peers) -> Self:
        """Opens a channel for the exchange, as `Peers.channel` does. `gather` raises PeerLost. To wait is progress: the
        watchdog of a process that hangs ends it.
        """
        channel = peers.channel()
        return cls(peers.rank, channel.gather, peers.name)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Ends the block without an error only once it has ended so in all processes.

        If it fails in one of them, the others raise OtherFailed, or Damaged if that is the error there.
        """
        try:
            yield
        except BaseException as error:
            self.gather([isinstance(error, Damaged), describe(error)])
            raise
        for rank, found in enumerate(self.gather(None)):
            if found is not None:
                damaged, message = found
                kind = Damaged if damaged else OtherFailed
                raise kind(as_message(f"{self.name(rank)} has failed: {message}"))


ALONE = Processes(0, lambda value: [value])


@contextmanager
def written_together(target: Path, facts: Mapping[str, Any], needed: int, processes: Processes) -> Iterator[Aside]:
    """Gives all processes a directory to write into, as `written_aside` does, with its errors in the first process.

    Each process writes files of its own, and needs `needed` bytes. `target` is replaced once the block has ended
    without an error in all of them.
    """
    total = sum(processes.gather(needed))
    with ExitStack() as stack:
        with processes.together():
            begun = stack.enter_context(written_aside(target, facts, total)) if processes.first else None
        name, *_ = processes.gather(begun.path.name if begun else None)
        aside = begun or Aside.of(target, name)
        with processes.together():
            yield aside
        for entries in processes.gather(aside.entries):
            aside.entries |= entries
        with processes.together():
            stack.close()
