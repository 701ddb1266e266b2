"""The process that holds a model for the Chat screen: requests and reports as JSON lines over its input and output.

It ends when its input is closed, and so with the interface. This module is the only one of the interface that imports
torch, and no other module imports it.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from rptrain.engine.failures import gpu_failure
from rptrain.inference.chat import Turn
from rptrain.inference.free_memory import free_memory
from rptrain.inference.load import LoadedChat
from rptrain.inference.settings import AnswerSettings
from rptrain.utils.errors import UserError, describe

ANSWERED = ("load", "ask", "retry")  # requests after which the process says that it waits; the others take no time
FAILURES = (UserError, OSError, torch.OutOfMemoryError)
MEASURED = 16  # tokens of an answer, so that its speed tells something
MEASURE = 1.0  # seconds between two reports of the speed of an answer


class Child:
    """Answers requests, one after the other; "stop" is noticed between two tokens of an answer."""

    def __init__(self, asked: TextIO, reports: TextIO) -> None:
        self._asked, self._reports = asked, reports
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._loaded: LoadedChat | None = None

    def serve(self) -> None:
        """Raises SystemExit with a message if a GPU fails: the process cannot use it any more."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            self._respond(self._requests.get())

    def _respond(self, request: dict[str, Any]) -> None:
        self._stop.clear()
        try:
            self._handle(**request)
        except FAILURES as error:
            turns = len(self._loaded.chat.turns) if self._loaded is not None else 0
            self._report("refused", text=_text(error), turns=turns)
        except RuntimeError as error:
            if gpu_failure(error) is None:
                raise
            sys.exit(_text(error))
        if request["do"] in ANSWERED:
            self._report("idle", **self._memory())

    def _read(self) -> None:
        for line in self._asked:
            request = json.loads(line)
            if request == {"do": "stop"}:
                self._stop.set()
            else:
                self._requests.put(request)
        os._exit(0)  # nothing is to be kept, and a step may take long

    def _handle(self, do: str, **given: Any) -> None:
        if do == "load":
            self._load(**given)
            return
        if self._loaded is None:  # a request that was sent before it was known that the model cannot be loaded
            return
        chat = self._loaded.chat
        if do in ("ask", "retry"):
            chat.system, chat.settings = given["system"], AnswerSettings(**given["settings"])
            with_base = given["base"] and self._load_base()
            self._answer(chat.ask(given["said"]) if do == "ask" else chat.retry(), base=False)
            if with_base and self._stop.is_set():
                self._report("stopped", base=True)
            elif with_base:
                self._answer(chat.ask_base(), base=True)
        elif do == "take_back":
            chat.take_back()
        elif do == "reset":
            chat.reset()

    def _load(self, source: str, placement: str, training: str, turns: list[list[str]]) -> None:
        """`training`: the name of a run that trains on this machine, or empty. `turns`: what was said and answered in a
        process before this one.
        """
        self._loaded = loaded = LoadedChat(Path(source), free_memory(training), placement)
        for number, (said, answer, base_answer) in enumerate(turns):
            loaded.chat.turns.append(Turn(said, number, answer, base_answer or None))
        self._report(
            "loaded",
            source=str(loaded.model.source),
            state=loaded.model.state,
            placement=loaded.placement.kind,
            reason=loaded.placement.reason,
            expected=loaded.placement.tokens_per_second,
            speeds=loaded.speeds,
            templated=loaded.chat.templated,
        )

    def _load_base(self) -> bool:
        """Whether the base model can answer; the tuned one answers alone otherwise."""
        assert self._loaded is not None
        try:
            self._loaded.load_base()
        except FAILURES as error:
            self._report("no base", text=_text(error))
            return False
        return True

    def _answer(self, pieces: Iterator[str], *, base: bool) -> None:
        assert self._loaded is not None
        reported = time.monotonic()
        for piece in pieces:
            self._report("piece", text=piece, base=base)
            if time.monotonic() - reported > MEASURE:
                reported = time.monotonic()
                self._report_speed(base=base)
            if self._stop.is_set():
                self._report("stopped", base=base)
                break
        self._report_speed(base=base)

    def _report_speed(self, *, base: bool) -> None:
        assert self._loaded is not None
        speaker = self._loaded.chat.base if base else self._loaded.chat.tuned
        if speaker is not None and speaker.speed is not None and speaker.speed.tokens >= MEASURED:
            self._report("measured", speed=speaker.speed.tokens_per_second, base=base)

    @staticmethod
    def _memory() -> dict[str, int]:
        """Bytes of the process: host memory, and memory of the GPU."""
        vram = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
        return {"host": psutil.Process().memory_info().rss, "vram": vram}

    def _report(self, kind: str, **values: Any) -> None:
        self._reports.write(json.dumps({"kind": kind, **values}) + "\n")
        self._reports.flush()


def _text(error: BaseException) -> str:
    """An error in one line; that of a GPU with what to do."""
    failed = gpu_failure(error)
    return describe(error) if failed is None else " ".join(failed.lines())


def main() -> None:
    """Serves requests. Output of libraries is discarded, because it would mix with the reports."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    try:
        Child(sys.stdin, reports).serve()
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
