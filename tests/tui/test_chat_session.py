"""The process that holds a model: what is asked of it, and what happens when it ends."""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from rptrain.inference.chat import Speed
from rptrain.inference.settings import AnswerSettings
from rptrain.tui.chat import session as chat_session
from rptrain.tui.chat.child import Child
from rptrain.tui.chat.session import ChatSession
from rptrain.utils.errors import UserError

from .conftest import driven, wait_for

DOUBLE = (sys.executable, str(Path(__file__).with_name("chat_double.py")))


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_session, "COMMAND", DOUBLE)


async def begun(source: str = "run") -> ChatSession:
    session = ChatSession(Path(source), Path(source))
    await session.begin()
    await wait_for(lambda: session.state in ("idle", "ended"))
    return session


async def answered(session: ChatSession, said: str) -> None:
    session.ask(said)
    await wait_for(lambda: session.state != "answering")


@driven
async def test_turns_another_try_and_the_base_model() -> None:
    session = await begun()
    assert session.loaded is not None and session.loaded.expected == 1234.5 and session.host == 300 << 20
    await answered(session, "a b")
    session.settings.base = True
    await answered(session, "c")
    assert [(turn.said, turn.answer, turn.base_answer) for turn in session.turns] == [
        ("a b", "A B ", ""),
        ("c", "C ", "[c]"),
    ]
    assert session.measured == 12.34 and [turn.base_asked for turn in session.turns] == [False, True]
    assert session.take_back() == "c" and len(session.turns) == 1
    session.reset()
    assert not session.turns
    await session.close()


@driven
async def test_a_message_that_is_taken_back_is_forgotten_by_the_process_too() -> None:
    session = await begun()
    for said in ("a b", "c"):
        await answered(session, said)
    assert session.take_back() == "c"
    session.retry()
    await wait_for(lambda: session.state == "idle")
    assert [turn.answer for turn in session.turns] == ["A B "]
    await session.close()


@driven
async def test_the_model_is_named_that_the_process_has_loaded(tmp_path: Path) -> None:
    (saved := tmp_path / "checkpoints/checkpoint-3").mkdir(parents=True)  # complete only when the process reads it
    session = await begun(str(tmp_path))
    assert session.model == saved
    await session.close()


@driven
async def test_another_try_draws_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    session, seeds = await begun(), list[int]()
    ask = session._ask

    def noted(do: str, **given: Any) -> None:
        seeds.append(given["settings"]["seed"])
        ask(do, **given)

    monkeypatch.setattr(session, "_ask", noted)
    await answered(session, "a")
    session.retry()
    await wait_for(lambda: session.state == "idle")
    assert len(set(seeds)) == len(seeds) == 2
    await session.close()


@driven
async def test_a_base_model_that_cannot_be_loaded_leaves_the_answer_and_is_switched_off() -> None:
    session = await begun()
    session.settings.base = True
    await answered(session, "no base")
    assert [(turn.answer, turn.base_answer) for turn in session.turns] == [("NO BASE ", "")]
    assert session.problem == "the base model is not here" and not session.settings.base
    await session.close()


def test_the_process_answers_without_a_base_model_that_cannot_be_loaded() -> None:
    def load_base() -> None:
        raise UserError("the base model is not here")

    reports = StringIO()
    child = Child(StringIO(), reports)
    chat = SimpleNamespace(ask=lambda said: [said], tuned=None, base=None)
    child._loaded = SimpleNamespace(chat=chat, load_base=load_base)  # pyright: ignore[reportAttributeAccessIssue]
    child._handle("ask", said="a", system="", base=True, settings=asdict(AnswerSettings()))
    assert [json.loads(line) for line in reports.getvalue().splitlines()] == [
        {"kind": "no base", "text": "the base model is not here"},
        {"kind": "piece", "text": "a", "base": False},
    ]


def test_requests_to_a_process_without_a_model_are_left_out() -> None:
    reports = StringIO()
    Child(StringIO(), reports)._handle("reset")
    assert not reports.getvalue()


def test_a_gpu_that_fails_ends_the_process_with_a_line() -> None:
    reports = StringIO()
    child = Child(StringIO(), reports)
    lost = torch.AcceleratorError("CUDA error: device lost\nCompile with `TORCH_USE_CUDA_DSA`")
    chat = SimpleNamespace(ask=Mock(side_effect=lost))
    child._loaded = SimpleNamespace(chat=chat)  # pyright: ignore[reportAttributeAccessIssue]
    request = {"do": "ask", "said": "a", "system": "", "base": False, "settings": asdict(AnswerSettings())}
    with pytest.raises(SystemExit, match=r"CUDA error: device lost\. .*dmesg.*\.$"):
        child._respond(request)
    assert not reports.getvalue()


def test_a_base_answer_that_is_stopped_before_it_begins_is_reported() -> None:
    reports = StringIO()
    child = Child(StringIO(), reports)

    def stopping(said: str) -> Iterator[str]:
        yield said
        child._stop.set()

    chat = SimpleNamespace(ask=stopping, tuned=None, base=None)
    child._loaded = SimpleNamespace(chat=chat, load_base=lambda: None)  # pyright: ignore[reportAttributeAccessIssue]
    child._handle("ask", said="a", system="", base=True, settings=asdict(AnswerSettings()))
    assert [json.loads(line)["kind"] for line in reports.getvalue().splitlines()] == ["piece", "stopped"]


@pytest.mark.parametrize(("tokens", "speeds"), [(15, []), (16, [7.5])])
def test_the_speed_of_a_short_answer_is_left_out(tokens: int, speeds: list[float]) -> None:
    reports = StringIO()
    child = Child(StringIO(), reports)
    tuned = SimpleNamespace(speed=Speed(4, 9.0, tokens, 2.0))
    chat = SimpleNamespace(tuned=tuned, base=None)
    child._loaded = SimpleNamespace(chat=chat)  # pyright: ignore[reportAttributeAccessIssue]
    child._answer(iter(()), base=False)
    assert [json.loads(line)["speed"] for line in reports.getvalue().splitlines()] == speeds


@driven
async def test_a_process_that_is_killed() -> None:
    session = await begun()
    assert session._process is not None
    session._process.kill()
    await wait_for(lambda: session.state == "ended")
    assert session.problem == "the process that holds the model was killed (SIGKILL), perhaps because memory ran out"
    await session.close()


@driven
async def test_an_answer_is_stopped() -> None:
    session = await begun()
    session.ask("wait")
    await wait_for(lambda: session.turns[0].answer == "WAIT ")
    assert session.take_back() == "", "an answer is on its way"
    session.stop()
    await wait_for(lambda: session.state == "idle")
    assert session.turns[0].stopped
    await session.close()


@driven
async def test_two_that_begin_at_once_leave_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    create, started = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()

    async def noted(*given: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await create(*given, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    session = ChatSession(Path("run"), Path("run"))
    await asyncio.gather(session.begin(), session.begin())
    await wait_for(lambda: session.state == "idle")
    first, second = started
    assert session._process is second and first.returncode is not None and second.returncode is None
    await session.close()


@driven
async def test_a_message_that_waits_for_a_model_that_cannot_be_loaded_returns() -> None:
    session = ChatSession(Path("broken"), Path("broken"))
    await session.begin()
    session.ask("a")
    session.reset()
    session.ask("b")
    await wait_for(lambda: session.state == "ended")
    assert session.problem == "neither a checkpoint nor a run" and (session.waiting, session.returned) == ("", "b")
    await session.close()


@driven
async def test_what_is_refused_was_not_said() -> None:
    session = await begun()
    await answered(session, "a")
    await answered(session, "refuse")
    assert session.problem == "too ␛[1mlong" and [turn.said for turn in session.turns] == ["a"]
    assert session.returned == "refuse"
    await answered(session, "b")
    assert session.problem == "" and len(session.turns) == 2
    for setting, value in (("temperature", float("nan")), ("top_p", 0.0)):
        session.settings.answers = AnswerSettings(**{setting: value})
        with pytest.raises(UserError):
            session.ask("c")
    assert len(session.turns) == 2
    await session.close()


@driven
async def test_another_try_that_is_refused_leaves_the_earlier_answer() -> None:
    session = await begun()
    await answered(session, "a")
    session.settings.system = "refuse"
    session.retry()
    assert session.turns[0].answer == "" and session.state == "answering"
    await wait_for(lambda: session.state == "idle")
    assert session.problem == "too ␛[1mlong", "the system prompt arrives"
    assert [(turn.said, turn.answer) for turn in session.turns] == [("a", "A ")] and session.returned == ""
    session.settings.system = ""
    session.retry()
    await wait_for(lambda: session.state == "idle")
    assert [turn.answer for turn in session.turns] == ["A "] and session.problem == ""
    await session.close()


@driven
async def test_what_has_no_answer_when_the_process_ends_was_not_said() -> None:
    session = await begun()
    await answered(session, "a")
    session.retry()
    await session.unload("training")
    assert [(turn.said, turn.answer) for turn in session.turns] == [("a", "A ")] and session.returned == ""
    await session.begin()
    await wait_for(lambda: session.state == "idle")
    session.ask("b")
    await session.unload("training")
    assert [turn.said for turn in session.turns] == ["a"] and session.returned == "b"
    await session.close()


@driven
async def test_a_model_that_is_unloaded_is_loaded_again_for_the_same_conversation() -> None:
    session = await begun()
    assert session._process is not None
    process = psutil.Process(session._process.pid)
    session.ask("wait")
    await wait_for(lambda: session.turns[0].answer == "WAIT ")
    await session.unload("training")
    assert not process.is_running() and (session.state, session.problem) == ("ended", "training")
    await session.unload("again")
    assert session.problem == "training", "the process has ended"
    await session.begin()
    await wait_for(lambda: session.state == "idle")
    assert [turn.said for turn in session.turns] == ["wait"]
    await session.close()


@driven
async def test_a_placement_is_kept_until_another_training_begins() -> None:
    training = ""
    session = ChatSession(Path("run"), Path("run"), training=lambda: training)

    async def placed(chosen: str | None = None) -> str:
        await session.begin(chosen)
        await wait_for(lambda: session.state == "idle")
        assert session.loaded is not None
        return session.loaded.placement

    assert await placed() == "cpu" and await placed("gpu") == "gpu" == await placed()
    training = "first"
    assert await placed() == "cpu" and session.placement == "auto"
    assert await placed("gpu") == "gpu" == await placed(), "it was chosen beside this training"
    training = ""
    assert await placed() == "gpu"
    training = "second"
    assert await placed() == "cpu"
    await session.close()


@driven
async def test_a_model_that_cannot_be_loaded() -> None:
    session = await begun("broken")
    assert session.state == "ended" and session.problem == "neither a checkpoint nor a run"
    await session.close()


@driven
async def test_a_process_that_dies_says_why_and_another_continues_the_conversation() -> None:
    session = await begun()
    await answered(session, "a")
    await answered(session, "die")
    await wait_for(lambda: session.state == "ended")
    assert session.problem == "the process that holds the model ended with status 3: RuntimeError: out of luck"
    assert session.returned == "die"
    await session.begin()
    await wait_for(lambda: session.state == "idle")
    await answered(session, "refuse")
    assert [turn.said for turn in session.turns] == ["a"], "the new process knows the first turn"
    await session.close()


@driven
async def test_the_process_ends_with_the_session_and_with_its_input() -> None:
    session = await begun()
    assert session._process is not None and session._process.stdin is not None
    process = psutil.Process(session._process.pid)
    session._process.stdin.close()
    await wait_for(lambda: session.state == "ended")
    assert not process.is_running()
    await session.begin()
    await wait_for(lambda: session.state == "idle")
    process = psutil.Process(session._process.pid)
    await session.close()
    assert not process.is_running() and session.state == "idle", "its end was already known"
