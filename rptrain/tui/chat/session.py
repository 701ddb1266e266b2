"""A conversation with a model that a process of its own holds, for as long as the interface runs."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rptrain.inference.settings import AnswerSettings
from rptrain.runs.folder.listing import training_beside
from rptrain.tui.chat.sources import readable_sources
from rptrain.utils.errors import describe
from rptrain.utils.text import as_message

COMMAND = (sys.executable, "-P", "-m", "rptrain.tui.chat.child")  # without the current directory on the path
LINE = 1 << 20  # bytes of a report at most
SAID = 2000  # bytes from the end of the errors of a process

State = Literal["loading", "idle", "answering", "ended"]


@dataclass
class ShownTurn:
    """What the user said, and what came back so far."""

    said: str
    answer: str = ""
    base_answer: str = ""
    base_asked: bool = False
    stopped: bool = False
    waiting: bool = False  # it is sent once the model is loaded


@dataclass
class Loaded:
    """The model in the process."""

    source: str  # the directory that answers
    placement: str
    reason: str
    expected: float  # tokens per second
    speeds: dict[str, float]  # those of all placements with enough free memory
    templated: bool
    state: str = ""  # of its run, such as "step 4"; empty: unknown


@dataclass
class ChatSettings:
    """What the next message is sent with."""

    answers: AnswerSettings = field(default_factory=AnswerSettings)
    system: str = ""
    base: bool = False  # the base model answers too


@dataclass
class ChatSession:
    """The process and what it said. `changed` is called whenever something is new."""

    run: Path  # or another folder of a model
    source: Path  # the run, or one of its checkpoints
    environment: Mapping[str, str] = field(default_factory=dict)
    training: Callable[[], str] = str  # the name of a run that is starting, or trains; empty: none that is known
    settings: ChatSettings = field(default_factory=ChatSettings)
    placement: str = "auto"
    state: State = "loading"
    turns: list[ShownTurn] = field(default_factory=list)
    loaded: Loaded | None = None
    loading_since: float = 0.0  # seconds of `time.monotonic`
    waiting: str = ""  # a message that is sent once the model is loaded, or free after a reset
    measured: float | None = None  # tokens per second of the last answer
    host: int = 0  # bytes of the process
    vram: int = 0
    problem: str = ""  # why the last request was refused, or why the process ended
    unsent: str = ""  # a message that is being written
    last: str = ""  # the last message, which stays when the conversation is forgotten
    returned: str = ""  # a message that was refused
    changed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.model = self.source  # the directory that is loaded, or was last
        self._process: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._beside = ""  # the training when the model was last loaded
        self._asked = 0  # questions, so that another try draws other tokens
        self._replaced: ShownTurn | None = None  # the turn before another try, until that has begun
        self._changing = asyncio.Lock()  # of the process

    async def begin(self, placement: str | None = None) -> None:
        """Starts the process, and loads the model for the conversation so far. An earlier process is ended.

        `placement`: chosen now. Without one, the last choice is kept, unless another training has begun since then.
        """
        async with self._changing:
            await self._end_process()
            await self._start(placement)

    async def unload(self, why: str) -> None:
        """Ends the process if there is one; `begin` loads the model, for the same conversation."""
        async with self._changing:
            if self.state != "ended":
                await self._end_process()
                self._end(why)

    async def close(self) -> None:
        """Ends the process."""
        async with self._changing:
            await self._end_process()

    async def _start(self, placement: str | None) -> None:
        self.state, self.loaded, self.problem, self.measured = "loading", None, "", None
        self.model, self.loading_since = self.source, time.monotonic()
        self.changed()
        self.model = next(iter(await asyncio.to_thread(readable_sources, self.source)), self.source)
        try:
            training = self.training() or await asyncio.to_thread(training_beside, self.source)
        except OSError as error:
            self._end(describe(error))
            return
        if placement is None:
            placement = self.placement if training in ("", self._beside) else "auto"
        self.placement, self._beside = placement, training
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_follow`)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **self.environment},
                limit=LINE,
                start_new_session=True,  # Ctrl+C in the terminal is the interface's
            )
        except OSError as error:
            errors.close()
            self._end(f"the process cannot be started: {error.strerror}")
            return
        self._following = asyncio.create_task(self._follow(self._process, errors))
        turns = [(turn.said, turn.answer, turn.base_answer) for turn in self.turns]
        self._ask("load", source=str(self.source), placement=placement, training=training, turns=turns)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        following, self._following = self._following, None
        if process is not None and process.returncode is None:
            process.kill()
        if following is not None:
            await following

    # ---- requests

    def ask(self, said: str) -> None:
        """Says something, or as soon as the model is loaded and free. Raises UserError for invalid settings."""
        self.last = said
        if self.state in ("loading", "answering"):
            self.waiting = said
            return
        self._answer("ask", said=said)
        self.turns.append(ShownTurn(said, base_asked=self.settings.base))

    def retry(self) -> None:
        """Asks for another answer to the last message. Raises UserError for invalid settings."""
        self._answer("retry")
        self._replaced = self.turns[-1]
        self.turns[-1] = ShownTurn(self._replaced.said, base_asked=self.settings.base)

    def _answer(self, do: str, **given: str) -> None:
        self.settings.answers.check()
        assert self.state == "idle"
        own = asdict(replace(self.settings.answers, seed=self._asked))
        self._asked += 1
        self.state, self.problem, self._replaced = "answering", "", None
        self._ask(do, **given, system=self.settings.system, base=self.settings.base, settings=own)

    def take_back(self) -> str:
        """Removes the last turn or the message that waits, and returns what was said; empty if there is none, or if an
        answer is on its way.
        """
        if self.waiting:
            said, self.waiting = self.waiting, ""
            return said
        if self.state != "idle" or not self.turns:
            return ""
        self._ask("take_back")
        said = self.turns.pop().said
        self.changed()
        return said

    def reset(self) -> None:
        """Forgets the conversation; stops an answer."""
        self.stop()
        self.turns.clear()
        self.waiting, self._replaced = "", None
        if self.state != "ended":
            self.problem = ""
        self._ask("reset")
        self.changed()

    def stop(self) -> None:
        """Stops the answer after its next token."""
        if self.state == "answering":
            self._ask("stop")

    def _ask(self, do: str, **given: Any) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")

    # ---- reports

    async def _follow(self, process: asyncio.subprocess.Process, errors: Any) -> None:
        assert process.stdout is not None
        with errors:
            async for line in process.stdout:
                if self._process is process:
                    self._take(**json.loads(line))
                    self.changed()
            code = await process.wait()
            if self._process is process:
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - SAID))
                said = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                self._end(": ".join([f"the process that holds the model {_ending(code)}", *said]))

    def _take(self, kind: str, **values: Any) -> None:
        turn = self.turns[-1] if self.turns else ShownTurn("")
        if kind == "loaded":
            self.loaded = Loaded(**values)
            self.model = Path(self.loaded.source)
        elif kind == "piece" and values["base"]:
            turn.base_answer += values["text"]
        elif kind == "piece":
            turn.answer += values["text"]
            self._replaced = None
        elif kind == "stopped":
            turn.stopped = True
        elif kind == "measured":
            self.measured = values["speed"] if not values["base"] else self.measured
        elif kind == "no base":
            self.settings.base, self.problem = False, as_message(values["text"])
            turn.base_asked = False
        elif kind == "refused":
            self.problem = as_message(values["text"])
            if self.loaded is not None:
                self._take_back_unanswered(values["turns"])
        elif kind == "idle":
            self.host, self.vram = values["host"], values["vram"]
            self.state = "idle" if self.loaded is not None else "ended"
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Sends the message that waited for the model; returns it to the input if the model was not loaded."""
        said, self.waiting = self.waiting, ""
        if said and self.state == "idle":
            self.ask(said)
        elif said:
            self.returned = said

    def _take_back_unanswered(self, turns: int) -> None:
        """`turns`: those that the process has."""
        if self._replaced is not None:
            self.turns[-1], self._replaced = self._replaced, None
        elif turns < len(self.turns):
            self.returned = self.turns[-1].said
            del self.turns[turns:]

    def _end(self, why: str) -> None:
        """The process is gone: what has no answer was not said."""
        if self.state == "answering" and self.turns and not self.turns[-1].answer:
            self._take_back_unanswered(len(self.turns) - 1)
        elif self.state == "answering" and self.turns:
            self.turns[-1].stopped = True
        self.state, self.problem = "ended", as_message(why)
        self._send_waiting()
        self.changed()


def _ending(code: int) -> str:
    """How a process ended; `code` as `subprocess.Popen.returncode`."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), perhaps because memory ran out"
    return f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
