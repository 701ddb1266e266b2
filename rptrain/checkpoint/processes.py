"""Write a directory from several processes, which share a file system. A single process is the case of one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rptrain.checkpoint.atomic_dir import Aside, Damaged, written_aside
from rptrain.utils.errors import describe
from rptrain.utils.text import as_message


class OtherFailed(OSError):
    """Another process could not do its part."""


@dataclass(frozen=True)
class Processes:
    """The processes that train a model, of which this is number `rank`.

    `gather` is called with a value for JSON by all of them, in the same order. It waits for all, and returns in each
    their values by rank. It raises an error if one is lost. `name` describes a process in messages.
    """

    rank: int
    gather: Callable[[Any], Sequence[Any]]
    name: Callable[[int], str] = "process {}".format

    @property
    def first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that ends without an error only if it does so in every process, and not before it has in all.

        If it fails in one, the others raise OtherFailed, or Damaged if that is its error.
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
                raise kind(as_message(f"{self.name(rank)} could not do its part: {message}"))


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
            made = written_aside(target, facts, total) if processes.first else None
            aside = stack.enter_context(made) if made else Aside.of(target)
        with processes.together():
            yield aside
        for entries in processes.gather(aside.entries):
            aside.entries |= entries
        with processes.together():
            stack.close()
