"""An app on folders of its own, whose helper answers at once with what a test says."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from inspect import getsource
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input

from rptrain.data.samples import FirstSamples, Sample, TextPart
from rptrain.doctor.checks import Check
from rptrain.tui.app import RptrainApp, make_app
from rptrain.tui.doctor import machine
from rptrain.tui.new_run import places, planning
from rptrain.tui.new_run.places import FoundModel
from rptrain.tui.new_run.planning import Planned

from ..run_tools import PATIENCE

GIB = 1 << 30
SAME = 5  # looks in which nothing changed
BRIEF = ("plan", "samples", "find", "preview", "compare", "look")  # groups of workers that come to an end


def planned(fits: bool = True) -> Planned:
    """A plan's report, as `rptrain plan --json` gives it."""
    places = [
        place("host memory", "host", [("optimizer state", 60), ("weights", 30), ("gradients", 15)], 200),
        *(
            place(
                "GPU memory",
                f"cuda:{n}",
                [("workspace of the largest stage", 9), ("parameters", 4)],
                24 if fits else 12,
            )
            for n in range(2)
        ),
        place("disk space", "disk", [("2 checkpoints of 45.0 GiB", 90), ("exported model", 15)], 900),
    ]
    remedy = {"changes": {"train.micro_batch_size": 1}, "saves": {"GPU memory": 2 * GIB}}
    report = {
        "fits": fits,
        "problem": None,
        "refusals": [],
        "warnings": [],
        "data_warnings": [],
        "model": {"path": "llama", "architecture": "LlamaForCausalLM", "parameters": 8_030_261_248, "layers": 33},
        "machine": {"here": True, "card": "RTX 4090", "tflops": 165, "link": 25e9, "devices": 2, "gpus": True},
        "step": {},
        "plan": {"seconds_per_step": 8.42, "tokens_per_second": 15566.0, "bubble": 0.006, "past": None},
        "length": {
            "steps": 1200,
            "sequences": 76_800,
            "seconds": 10_104.0,
            "epochs": 3.04,
            "tokens": 151_000_000,
            "exact": False,
            "fixed": True,
            "filled": 0.97,
            "longest": 61,
            "shorter": None,
            "measured_seconds": None,
        },
        "memory": places,
        "advice": {"remedies": [] if fits else [remedy], "missing": {}},
    }
    stages = "F 0-31 in 5 stages of 6 to 7, fused 32, B 0-31 in 16 stages of 2"
    return Planned(report, stages, "" if fits else "what makes it fit:\n- train.micro_batch_size = 1 fits")


def place(kind: str, name: str, parts: list[tuple[str, int]], limit: int) -> dict[str, Any]:
    total = sum(size for _, size in parts) * GIB
    return {
        "kind": kind,
        "name": name,
        "parts": [{"name": part, "nbytes": size * GIB} for part, size in parts],
        "limit": limit * GIB,
        "source": "free",
        "notes": [],
        "total": total,
        "fits": total <= limit * GIB,
    }


PREVIEW = FirstSamples(
    "conversations, 1.14 MiB",
    (
        Sample(
            "chats.jsonl:1",
            12,
            4,
            (TextPart("<user>Two and two?<end><assistant>", False), TextPart("Four.<end>", True)),
        ),
        Sample("chats.jsonl:2", 5, 0, (TextPart("<user>Hm<end>", False),)),
    ),
)
MODELS = [
    FoundModel("tiny-tasks", "bundled", 407_000, "Qwen3", True),
    FoundModel("llama-3.1-8b", "bundled", 8_030_261_248, "Llama", False),
    FoundModel("/models/odd", "/models", 0, "config.json: architecture 'Odd' is not supported", True),
]
FINDINGS = [
    Check("GPU", "ok", "cuda:0 NVIDIA GeForce RTX 4090, 24 GiB, driver 570.1"),
    Check("page-locking", "warning", "the limit is 8 MiB", "raise it: ulimit -l unlimited"),
    Check("disk", "ok", "900 GiB free in runs, 1,900 MB/s written and synced"),
]


class Scripted:
    """A helper that knows its answers; what is an exception is raised."""

    def __init__(self) -> None:
        self.answers: dict[Callable[..., Any], Any] = {
            planning.plan: planned(),
            planning.preview: PREVIEW,
            machine.checks: FINDINGS,
            places.models: MODELS,
            places.has_weights: True,
        }
        self.asked: list[tuple[Any, ...]] = []
        self.closed = 0

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        self.asked.append((function, *given))
        answer = self.answers[function]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def rarely_collected() -> Iterator[None]:
    """Searches for cycles among new objects only, as the program does."""
    before = gc.get_threshold()
    gc.set_threshold(20_000, 50, 1_000_000)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def helper() -> Scripted:
    return Scripted()


@pytest.fixture
def make(tmp_path: Path, helper: Scripted, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RptrainApp]:
    """The app in an empty folder; `make(attach=…)` and the like."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("rptrain.tui.new_run.screen.PAUSE", 0.0)
    monkeypatch.setattr("rptrain.tui.new_run.picker.PAUSE", 0.0)
    for screen in ("run.screen", "runs.screen", "export.exporting"):
        monkeypatch.setattr(f"rptrain.tui.{screen}.PAUSE", 0.1)

    def make(**named: Any) -> RptrainApp:
        return make_app(**{"helper": helper, "settings": tmp_path / "settings" / "tui.toml", "welcome": False} | named)

    return make


class Page(App[None]):
    """A widget alone."""

    def __init__(self, shown: Widget) -> None:
        super().__init__()
        self._shown = shown

    def compose(self) -> ComposeResult:
        yield self._shown


def driven(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


async def until(pilot: Pilot[Any], holds: Callable[[], bool]) -> None:
    """Waits for what workers bring about. The deadline only ends a hang."""
    end = monotonic() + PATIENCE
    while not holds():
        assert monotonic() < end, f"not within {PATIENCE} seconds: {getsource(holds).strip()}\n{screen_text(pilot.app)}"
        await pilot.pause(0.02)
    await pilot.pause()  # what came with it


async def focus(pilot: Pilot[Any], selector: str) -> Widget:
    await until(pilot, lambda: len(pilot.app.screen.query(selector)) == 1)
    widget = pilot.app.screen.query_one(selector)
    widget.focus()
    await until(pilot, lambda: pilot.app.focused is widget)
    return widget


async def type_over(pilot: Pilot[Any], value: str, selector: str = "Input") -> None:
    """Types a value in place of what stands in a line, once that has the focus."""
    editor = await focus(pilot, selector)
    assert isinstance(editor, Input)
    await press_until(pilot, "home", lambda: editor.cursor_position == 0)
    await press_until(pilot, "ctrl+k", lambda: editor.value == "")
    await pilot.press(*value)
    await until(pilot, lambda: editor.value == value)


async def press_until(pilot: Pilot[Any], key: str, holds: Callable[[], bool]) -> None:
    """A key, and what comes of it, before another one is pressed."""
    await pilot.press(key)
    await until(pilot, holds)


async def settled(pilot: Pilot[Any]) -> str:
    """The screen's text, once all that changes it is done: what workers look up, and what follows in messages."""
    before, same = None, 0
    while same < SAME:
        await pilot.pause(0.02)
        await until(pilot, lambda: all(worker.is_finished for worker in pilot.app.workers if worker.group in BRIEF))
        text = screen_text(pilot.app)
        before, same = text, same + 1 if text == before else 0
    assert before is not None
    return before


async def wait_for(holds: Callable[[], bool]) -> None:
    """As `until`, where there is no app."""
    end = monotonic() + PATIENCE
    while not holds():
        assert monotonic() < end, f"not within {PATIENCE} seconds: {getsource(holds).strip()}"
        await asyncio.sleep(0.02)


def screen_text(app: Any) -> str:
    """What the screen shows, as lines of text without color."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)


def notified(app: Any) -> str:
    """What is told in notes on the screen, which may be broken into lines there."""
    return "\n".join(note.message for note in app._notifications)


def widget_text(widget: Widget) -> str:
    return "\n".join(widget.render_line(y).text.rstrip() for y in range(widget.size.height))


Made = Callable[..., RptrainApp]
Step = Callable[[Pilot[Any]], Awaitable[None]]
