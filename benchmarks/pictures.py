"""The pictures of the terminal interface: `python -m benchmarks.pictures` writes benchmarks/results/tui/*.svg.

They show a real run of the bundled example on two CPU workers, which takes about two minutes. session.svg is animated:
a run is started, paused, resumed, left and attached to again.
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from rich.console import Console
from rich.text import Text
from textual.pilot import Pilot

from benchmarks.animated_svg import combine, without_fonts
from rptrain.runs.view.run_view import RunView
from rptrain.tui.app import RptrainApp, make_app
from rptrain.tui.services.draft import Draft

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "results" / "tui"
SIZE = (110, 32)
PATIENCE = 300  # seconds to wait for a state of the screen
RUN = Path("runs", "tiny-tasks")


def screen_text(app: RptrainApp) -> str:
    return "\n".join("".join(segment.text for segment in line) for line in app.screen._compositor.render_strips())


async def until(pilot: Pilot[Any], holds: Callable[[], bool]) -> None:
    end = monotonic() + PATIENCE
    while not holds():
        assert monotonic() < end, screen_text(pilot.app)
        await pilot.pause(0.05)
    await pilot.pause(0.2)


def take(app: RptrainApp) -> str:
    return without_fonts(app.export_screenshot(title="rptrain", simplify=True))


def shell(*lines: str) -> str:
    """A frame of a shell with these lines."""
    console = Console(width=SIZE[0], height=SIZE[1], file=StringIO(), force_terminal=True, record=True)
    for line in lines + ("",) * (SIZE[1] - len(lines)):
        console.print(Text(line.ljust(SIZE[0]), style="#d5d9e2 on #191d26"), end="\n")
    return without_fonts(console.export_svg(title="rptrain"))


class Film:
    """Frames with their durations in seconds."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, float]] = []

    def add(self, svg: str, seconds: float) -> None:
        self.frames.append((svg, seconds))

    async def record(self, pilot: Pilot[Any], ends: Callable[[], bool], every: float, seconds: float) -> None:
        """A frame every `every` seconds of the run until `ends`, each shown for `seconds`."""
        limit = monotonic() + PATIENCE
        while not ends():
            assert monotonic() < limit, screen_text(pilot.app)
            await pilot.pause(every)
            self.add(take(pilot.app), seconds)


def app(**named: Any) -> RptrainApp:
    made = make_app(settings=Path("settings.toml"), **named)
    made.theme = "dark"
    return made


async def session() -> None:
    """One run, started, paused, left and attached to again."""
    film = Film()
    async with (made := app()).run_test(size=SIZE, notifications=True) as pilot:
        await until(pilot, lambda: "✓ fits" in screen_text(made))
        save("new-run", take(made))
        film.add(take(made), 2.0)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "▶ training" in screen_text(made))
        await film.record(pilot, lambda: step() >= 400, 1.2, 0.4)
        await pilot.press("space")
        await until(pilot, lambda: "paused" in screen_text(made))
        film.add(take(made), 1.5)
        await pilot.press("space")
        await until(pilot, lambda: "▶ training" in screen_text(made))
        await film.record(pilot, lambda: step() >= 700, 1.2, 0.4)
    film.add(shell("$ rptrain", "$"), 1.0)
    film.add(shell("$ rptrain", f"$ rptrain attach {RUN}"), 1.5)
    async with (made := app(attach=RUN)).run_test(size=SIZE, notifications=True) as pilot:
        await until(pilot, lambda: "▶ training" in screen_text(made))
        poster = len(film.frames)
        await film.record(pilot, lambda: step() >= 1100 or "finished" in screen_text(made), 1.5, 0.4)
        await until(pilot, lambda: "✓ finished" in screen_text(made))
        film.add(take(made), 3.0)
        await pilot.press("f3")
        await until(pilot, lambda: "tiny-tasks" in screen_text(made))
        await pilot.press("space")
        made.theme = "light"
        await until(pilot, lambda: "━ tiny-tasks" in screen_text(made))
        save("runs", take(made))
        await pilot.press("f4")
        await until(pilot, lambda: "synced" in screen_text(made))
        save("doctor", take(made))
    save("session", combine(film.frames, poster, "A run of the bundled example in the terminal interface"))


def step() -> int:
    """The last recorded step of the run."""
    return RunView(RUN).step


def save(name: str, svg: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(svg)


def main() -> None:
    with TemporaryDirectory(prefix="rptrain-") as folder:
        os.chdir(folder)
        shutil.copy(ROOT / "rptrain.toml", "rptrain.toml")
        draft = Draft.open(Path("rptrain.toml"))
        draft.put("engine.devices", "cpu:2")
        draft.save()
        asyncio.run(session())
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
