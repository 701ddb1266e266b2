"""How every screen looks: its text, some at every size, and that colors, or none at all, leave it legible."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.color import Color
from textual.pilot import Pilot
from textual.widgets import Input

from rptrain.checkpoint.atomic_dir import written_aside
from rptrain.checkpoint.export_progress import KIND
from rptrain.tui.app import RptrainApp
from rptrain.tui.chat import session as chat_session
from rptrain.tui.data import pages
from rptrain.tui.new_run import planning
from rptrain.tui.services import launch

from .. import run_tools as tools
from .conftest import Made, Scripted, driven, focus, planned, press_until, screen_text, settled, until
from .recorded import BEGAN, make_run
from .test_chat_session import DOUBLE
from .test_data_screen import page_of
from .test_data_sets import TEXT as SETS

pytestmark = pytest.mark.long

SIZES = ((80, 24), (120, 36), (200, 50))
EXPORTS = ("export", "export again", "exporting", "exported")
FIRST = ("model", "data", "method")  # the questions of the first run
SCREENS = (
    *FIRST,
    *("new", "unfit", "sets", "browser", "run", "schedule", "several", "ended", "runs", "chat", "doctor", "help"),
    "picker",
    *EXPORTS,
)
LAYOUTS = ("data", "new", "sets", "run", "runs")  # what is where depends on the size
STYLED = ("new", "run", "runs", "chat", "export")
CODE = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = "/models/llama-3.1-8b"
path = "runs/llama-export"
model = AutoModelForCausalLM.from_pretrained(base)
model = PeftModel.from_pretrained(model, path)
tokenizer = AutoTokenizer.from_pretrained(path)"""
RECORDS = (
    {"phase": "writing", "bytes": 3 << 30, "total": 12 << 30},
    {"phase": "done", "path": "out", "code": CODE},
)
CONTRAST = 3.0  # at least, of text that is read, by WCAG 2
BEHIND = 1.6  # of the dimmed screen behind a dialog


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing that depends on the clock, the place or the machine."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("rptrain.runs.folder.listing.folder_bytes", lambda folder: 90 << 30)
    monkeypatch.setattr("rptrain.tui.runs.run_rows.time.time", lambda: BEGAN + 7200)
    monkeypatch.setattr("rptrain.runs.folder.listing.time.time", lambda: BEGAN + 840)
    monkeypatch.setattr(launch, "COMMAND", ("false",))
    monkeypatch.setattr(chat_session, "COMMAND", DOUBLE)
    script = "cat records; grep -q done records || while ! test -e go; do sleep 0.2; done"
    monkeypatch.setattr(launch, "EXPORT", ("sh", "-c", script, "export"))
    yield
    (tmp_path / "go").touch()  # ends the export that is shown
    monkeypatch.undo()
    time.tzset()


async def show(pilot: Any, helper: Scripted, screen: str) -> None:
    """Brings a screen about."""
    app = pilot.app
    if screen in FIRST:
        for number, title in enumerate(FIRST, 1):
            shown = ("config only", "builtin:random", "4-bit")[number - 1]
            await until(
                pilot,
                lambda number=number, shown=shown: all(part in screen_text(app) for part in (f"{number} of 3", shown)),
            )
            if screen == title:
                return
            await pilot.press(*("llama" if number == 1 else ""), "enter")
    await until(pilot, lambda: "fit" in screen_text(app))
    if app.size.width >= 160:
        await until(pilot, lambda: "Two and two?" in screen_text(app))
    if screen == "unfit":
        await until(pilot, lambda: "alt+1 micro-batch = 1" in screen_text(app))
    elif screen == "sets":
        await until(pilot, lambda: "data 2" in screen_text(app))
    elif screen == "browser":
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "question 1" in screen_text(app))
    elif screen in ("run", "schedule", "several", "ended"):
        await pilot.press("f3")
        await until(pilot, lambda: "training" in screen_text(app))
        await pilot.press(*(["down"] if screen == "ended" else []), "enter")
        word = "fell off" if screen == "ended" else "step 400"
        await until(pilot, lambda: word in screen_text(app))
        if screen == "schedule":
            await pilot.press("t")
            await until(pilot, lambda: "planned" in screen_text(app))
    elif screen == "runs":
        await pilot.press("f3")
        await until(pilot, lambda: "training" in screen_text(app))
        await pilot.press("space", "down", "space")
        await until(pilot, lambda: "B broken" in screen_text(app))
    elif screen == "chat":
        await pilot.press("f3")
        await until(pilot, lambda: "training" in screen_text(app))
        await pilot.press("c")
        await until(pilot, lambda: "expected" in screen_text(app))
        await pilot.press("ctrl+b", *"Who wrote Moby-Dick?", "enter")
        await until(pilot, lambda: "12 tokens/s" in screen_text(app))
        await pilot.press(*"refuse", "enter")
        await until(pilot, lambda: "too ␛" in screen_text(app))
    elif screen in EXPORTS:
        await show_export(pilot, screen)
    elif screen == "doctor":
        await pilot.press("f4")
        await until(pilot, lambda: "synced" in screen_text(app))
    elif screen == "help":
        await pilot.press("f1")
        await until(pilot, lambda: "between settings" in screen_text(app))
    elif screen == "picker":
        await focus(pilot, "#data-train-0-path")
        await pilot.press("enter")
        await until(pilot, lambda: "Two and two?" in screen_text(app) and "built in" in screen_text(app))


async def show_export(pilot: Pilot[Any], screen: str) -> None:
    """From the list of runs, up to one of EXPORTS."""
    await pilot.press("f3")
    await until(pilot, lambda: "training" in screen_text(pilot.app))
    await press_until(pilot, "e", lambda: "Export llama" in screen_text(pilot.app))
    shown = {
        "export": "as trained",
        "export again": "Replace llama-export?",
        "exporting": "3.00 GiB of 12.0 GiB",
        "exported": "Load it with",
    }
    if screen != "export":
        await focus(pilot, "#to")
        await pilot.press("enter")
    await until(pilot, lambda: shown[screen] in screen_text(pilot.app))


def app_for(make: Made, helper: Scripted, screen: str) -> RptrainApp:
    if screen not in FIRST:
        make_run(Path("runs"), "llama", processes=2 if screen == "several" else 1)
        make_run(Path("runs"), "broken", steps=210, end="failed", alive=False, began=BEGAN - 3000)
    if screen == "sets":
        Path("rptrain.toml").write_text(SETS)
    helper.answers[pages.page] = page_of(0, 0, 5, False)
    helper.answers[planning.plan] = planned(fits=screen != "unfit")
    if screen in EXPORTS:
        with Path("runs/llama/config.toml").open("a") as config:
            config.write("[lora]\nr = 8\n")
        tools.write_checkpoint(Path("runs/llama/checkpoints/checkpoint-200"))
        Path("records").write_text("\n".join(map(json.dumps, RECORDS[: 1 + (screen == "exported")])) + "\n")
    if screen == "export again":
        with written_aside(Path("runs/llama-export"), {"kind": KIND}, 0) as aside:
            aside.write("weights", [b"x"])
    app = make(welcome=screen in FIRST)
    app.animation_level = "none"
    return app


@pytest.mark.parametrize("screen", SCREENS)
@driven
async def test_text_and_colors(make: Made, helper: Scripted, snapshot: Any, screen: str):
    """The text, of layouts at each size, whatever it was before; and in both looks every letter differs from what it
    stands on.
    """
    app = app_for(make, helper, screen)
    small = ((60, 24),) if screen in ("data", "sets") else ()
    sizes = (*small, *reversed(SIZES), *SIZES[1:]) if screen in LAYOUTS else SIZES[1:2]
    async with app.run_test(size=sizes[-1]) as pilot:
        await show(pilot, helper, screen)
        for width, height in sizes:
            await pilot.resize_terminal(width, height)
            text = await settled(pilot)
            lines = text.split("\n")
            assert len(lines) == height and max(map(len, lines)) <= width
            assert snapshot(name=f"{screen} {width}x{height}") == text
        for look in ("light", "dark"):
            app.theme = look
            await settled(pilot)
            check_contrast(app, screen)


@pytest.mark.grid
@pytest.mark.parametrize("screen", [screen for screen in SCREENS if screen not in STYLED])
@driven
async def test_without_color(make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch, screen: str):
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_for(make, helper, screen)
    async with app.run_test(size=(80, 24)) as pilot:
        await show(pilot, helper, screen)
        await settled(pilot)
        check_gray(app, screen)


def check_gray(app: RptrainApp, screen: str) -> None:
    check_contrast(app, screen)
    for segment, fore, back in colored(app):
        assert len(set(fore)) == 1 and len(set(back)) == 1, segment


@pytest.mark.parametrize("look", ["light", "no color"])
@pytest.mark.parametrize("screen", STYLED)
@driven
async def test_styles(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch, snapshot: Any, screen: str, look: str
):
    """The styles on a screen, each with the first text that has it."""
    if look == "no color":
        monkeypatch.setenv("NO_COLOR", "1")
    app = app_for(make, helper, screen)
    app.theme = "light" if look == "light" else "dark"
    async with app.run_test(size=SIZES[1]) as pilot:
        await show(pilot, helper, screen)
        for entry in app.screen.query(Input):
            entry.cursor_blink = False
        await settled(pilot)
        assert snapshot(name=f"{screen} {look}") == "\n".join(styles(app))
        if look == "no color":
            check_gray(app, screen)


def styles(app: RptrainApp) -> list[str]:
    """Each style on the screen, sorted, with the first text that has it."""
    found: dict[str, str] = {}
    for segment, fore, back in colored(app):
        assert segment.style is not None
        attributes = [name for name in ("bold", "dim", "italic", "underline") if getattr(segment.style, name)]
        style = " ".join([f"#{bytes(fore).hex()} on #{bytes(back).hex()}", *attributes])
        found.setdefault(style, segment.text.strip()[:20])
    return [f"{style}: {text}" for style, text in sorted(found.items())]


def check_contrast(app: RptrainApp, screen: str) -> None:
    least = BEHIND if screen in ("help", "picker", *FIRST) else CONTRAST
    read = [part for part in colored(app, dialog=screen in EXPORTS) if re.search(r"\w", part[0].text)]
    assert len(read) >= (3 if screen in EXPORTS else 11)
    for segment, fore, back in read:
        assert contrast(fore, back) >= least, (segment.text, fore, back)


RGB = tuple[int, int, int]


def colored(app: RptrainApp, *, dialog: bool = False) -> Iterator[tuple[Any, RGB, RGB]]:
    """The parts of the screen, or of the dialog on it, with the colors of their letters and of what is behind them."""
    lines = app.screen._compositor.render_strips()
    if dialog:
        place = app.screen.query_one(".dialog").region
        lines = [line.crop(place.x, place.right) for line in lines[place.y : place.bottom]]
    for line in lines:
        for segment in line:
            style = segment.style
            if segment.text.strip() and style is not None and style.color is not None and style.bgcolor is not None:
                fore, back = of(style.color), of(style.bgcolor)
                yield (segment, back, fore) if style.reverse else (segment, fore, back)


def of(color: Color) -> RGB:
    assert color.triplet is not None
    return (color.triplet.red, color.triplet.green, color.triplet.blue)


def contrast(one: RGB, other: RGB) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: RGB) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
