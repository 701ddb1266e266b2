"""Runs cases in slots: folders with sound files, each with a process that runs one command at a time."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from benchmarks.bad_inputs import judge, sound
from benchmarks.bad_inputs.case import Case
from benchmarks.bad_inputs.server import Order, Server

SHOWN = 1500  # characters at the end of the output that a result keeps
STREAMS = ("stdin", "stdout", "stderr")
MAKING = 120.0  # seconds that the sound files may take
LONGEST = 200  # characters of an argument that a result keeps


@dataclass(frozen=True)
class Result:
    case: Case
    code: int
    seconds: float
    peak: int
    faults: tuple[str, ...]
    output: str

    def to_dict(self) -> dict[str, object]:
        case = self.case
        return {
            "number": case.number,
            "area": case.area,
            "case": case.name,
            "args": [part if len(part) <= LONGEST else f"{part[:LONGEST]}…" for part in case.args],
            "expected": case.expected,
            "code": self.code,
            "seconds": self.seconds,
            "peak_bytes": self.peak,
            "verdict": "failed" if self.faults else "passed",
            "faults": list(self.faults),
            "output": self.output,
        }


class Slot:
    """A folder for the files of one case at a time, and the process that runs it. Context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = Server()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self._server.__enter__()
        for name in STREAMS:
            (self._folder / name).touch()
        made = self._server.run(replace(self._order((), self._folder), sound=True, seconds=MAKING))
        if made.code:
            self.__exit__()
            raise RuntimeError(f"the sound files cannot be made: {_read(self._folder / 'stderr')}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.__exit__(*exception)

    def run(self, case: Case) -> Result:
        folder = sound.restore(self._folder)
        for edit in case.edits:
            edit(folder)
        order = replace(self._order(case.args, folder), fresh=case.fresh, as_user=case.as_user)
        if case.first:
            self._server.run(replace(order, args=case.first))
        for name in STREAMS:
            (self._folder / name).write_bytes(case.stdin if name == "stdin" else b"")
        before = judge.snapshot(self._folder)
        ended = self._server.run(order)
        stdout, stderr = (_read(self._folder / name) for name in ("stdout", "stderr"))
        found = [
            *judge.faults(case, ended, stdout, stderr),
            *judge.changes(case, before, judge.snapshot(self._folder)),
            *judge.copied_secrets(self._folder, before),
        ]
        return Result(case, ended.code, ended.seconds, ended.peak, tuple(found), (stdout + stderr)[-SHOWN:])

    def _order(self, args: tuple[str, ...], folder: Path) -> Order:
        stdin, stdout, stderr = (str(self._folder / name) for name in STREAMS)
        environment = sound.environment(self._folder)
        return Order(args, str(folder), stdin, stdout, stderr, environment, judge.SECONDS, judge.NBYTES)


def run_all(cases: Sequence[Case], folder: Path, jobs: int, tell: Callable[[Result], object]) -> list[Result]:
    """Runs cases in so many slots at a time. `tell` is called after each, by one thread at a time. Results are in the
    order of `cases`."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(cases)):
        waiting.put(index)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    lock = threading.Lock()

    def indexes() -> Iterator[int]:
        while not errors:
            try:
                yield waiting.get_nowait()
            except queue.Empty:
                return

    def work(slot_folder: Path) -> None:
        try:
            with Slot(slot_folder) as slot:
                for index in indexes():
                    result = slot.run(cases[index])
                    with lock:
                        results[index] = result
                        tell(result)
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            errors.append(error)

    threads = [threading.Thread(target=work, args=(folder / f"slot-{number}",)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


def _read(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(judge.READ).decode(errors="replace")
