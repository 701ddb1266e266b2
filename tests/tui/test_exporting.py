"""Export: what is asked, what may be replaced, the progress, and the code that loads the result."""

import errno
import fcntl
import json
from pathlib import Path

import pytest
from textual.widgets import Button

from rptrain.checkpoint.atomic_dir import MANIFEST, written_aside
from rptrain.checkpoint.export_progress import KIND
from rptrain.tui.export.exporting import Exporting
from rptrain.tui.services import launch
from rptrain.tui.widgets.choice import Choice

from .conftest import Made, driven, focus, notified, press_until, screen_text, type_over, until
from .recorded import make_run

pytestmark = pytest.mark.long

GIB = 1 << 30
CODE = "model = AutoModelForCausalLM.from_pretrained('/models/[b]out')"
NOTE = "vLLM needs [this]"
RECORDS = (
    {"phase": "checking", "bytes": 0, "total": 0},
    {"phase": "writing", "bytes": 3 * GIB, "total": 12 * GIB},
    {"phase": "done", "path": "out", "step": 4, "code": CODE, "note": NOTE},
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of adapters with two checkpoints."""
    run = make_run(tmp_path / "runs", end="finished")
    for step in (200, 1000):
        (run / "checkpoints" / f"checkpoint-{step}").mkdir()
        (run / "checkpoints" / f"checkpoint-{step}" / MANIFEST).touch()
    (run / "config.toml").write_text((run / "config.toml").read_text() + "[lora]\nr = 8\n")
    return run


async def asked(pilot, run: Path) -> None:
    await until(pilot, lambda: "✓ finished" in screen_text(pilot.app))
    await press_until(pilot, "e", lambda: f"Export {run.name}" in screen_text(pilot.app))
    await focus(pilot, "#to")


@driven
async def test_what_is_chosen_is_passed_on(make: Made, run: Path, monkeypatch):
    monkeypatch.setattr(launch, "EXPORT", ("sh", "-c", 'echo "$@" > said', "export"))
    app = make(attach=run)
    async with app.run_test(size=(80, 24)) as pilot:
        await asked(pilot, run)
        assert "result (step 1000)" in screen_text(app)
        await type_over(pilot, "out", "#to")
        for key, id, value in (
            ("right", "source", "step 1000"),
            ("right", "source", "step 200"),
            ("left", "dtype", "float32"),
            ("right", "merge", "merged model"),
        ):
            choice = await focus(pilot, f"#{id}")
            assert isinstance(choice, Choice)
            await press_until(pilot, key, lambda choice=choice, value=value: choice.value == value)
        await press_until(pilot, "up", lambda: app.focused.id == "dtype")
        await press_until(pilot, "enter", Path("said").exists)  # from any of the fields
        checkpoint = run / "checkpoints" / "checkpoint-200"
        expected = f"{checkpoint} --to out --json --merge --dtype float32\n"
        await until(pilot, lambda: Path("said").read_text() == expected)


@driven
async def test_merging_is_offered_for_adapters_only(make: Made, run: Path):
    config = run / "config.toml"
    for text, offered in ((config.read_text(), True), (config.read_text().partition("[lora]")[0], False)):
        config.write_text(text)
        async with make(attach=run).run_test(size=(80, 24)) as pilot:
            await asked(pilot, run)
            assert bool(pilot.app.screen.query("#merge")) == offered


@driven
async def test_the_checkpoint_with_the_lowest_validation_loss_is_marked(make: Made, run: Path):
    """Not a lower loss after a step that has no checkpoint."""
    with (run / "events.jsonl").open("a") as file:
        for step, loss in ((200, 1.5), (300, 1.25), (1000, 1.75)):
            file.write(json.dumps({"event": "evaluation", "time": 1.7e9, "step": step, "name": "loss", "score": loss}))
            file.write("\n")
    async with make(attach=run).run_test(size=(120, 24)) as pilot:
        await asked(pilot, run)
        choice = await focus(pilot, "#source")
        assert isinstance(choice, Choice)
        for value in ("step 1000", "step 200 (lowest validation loss)"):
            await press_until(pilot, "right", lambda value=value: choice.value == value)
            assert value in screen_text(pilot.app)


@driven
async def test_only_an_export_is_replaced_after_a_question(make: Made, run: Path, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(launch, "EXPORT", ("sh", "-c", 'echo "$@" > said', "export"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with written_aside(tmp_path / "out", {"kind": KIND}, 0) as aside:
        aside.write("weights", [b"x"])
    app = make(attach=run)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await asked(pilot, run)
        await type_over(pilot, "mine", "#to")
        await press_until(pilot, "enter", lambda: "an export did not write it" in notified(app))
        await type_over(pilot, "out", "#to")
        await press_until(pilot, "enter", lambda: "Replace out?" in screen_text(app))
        await press_until(pilot, "n", lambda: "Replace out?" not in screen_text(app))
        assert f"Export {run.name}" in screen_text(app) and not Path("said").exists()
        await press_until(pilot, "enter", lambda: "Replace out?" in screen_text(app))
        await press_until(pilot, "y", Path("said").exists)


@driven
async def test_the_bytes_are_shown_and_then_the_code(make: Made, run: Path, monkeypatch):
    for number, record in enumerate(RECORDS):
        Path(f"{number}.json").write_text(json.dumps(record) + "\n")
    script = "cat 0.json 1.json; while ! test -e go; do sleep 0.1; done; cat 2.json"
    monkeypatch.setattr(launch, "EXPORT", ("sh", "-c", script, "export"))
    app = make(attach=run)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await asked(pilot, run)
        await type_over(pilot, "out", "#to")
        await press_until(pilot, "enter", lambda: "writing  3.00 GiB of 12.0 GiB" in screen_text(app))
        Path("go").touch()
        await until(pilot, lambda: "step 4 exported to out" in screen_text(app) and "[b]out" in screen_text(app))
        assert NOTE in screen_text(app)
        await press_until(pilot, "y", lambda: app.clipboard == CODE and "if the terminal lets" in notified(app))
        await press_until(pilot, "enter", lambda: not isinstance(app.screen, Exporting))
        await asked(pilot, run)  # closed before its end, the export tells the code in a note
        Path("go").unlink()
        await type_over(pilot, "out", "#to")
        await press_until(pilot, "enter", lambda: "3.00 GiB" in screen_text(app))
        await press_until(pilot, "escape", lambda: not isinstance(app.screen, Exporting))
        Path("go").touch()
        await until(pilot, lambda: CODE in notified(app))


@driven
async def test_a_failure_is_shown_where_the_progress_was(make: Made, run: Path, monkeypatch):
    Path("0.json").write_text(json.dumps(RECORDS[1]) + "\n")
    monkeypatch.setattr(launch, "EXPORT", ("sh", "-c", 'cat 0.json; echo "no [room] left" >&2; exit 1', "export"))
    app = make(attach=run)
    async with app.run_test(size=(60, 24)) as pilot:
        await asked(pilot, run)
        await type_over(pilot, "out", "#to")
        await press_until(pilot, "enter", lambda: "no [room] left" in screen_text(app))
        assert "see .out.rptrain-log" in screen_text(app) and "3.00 GiB" not in screen_text(app)
        assert not app.screen.query_one("#copy", Button).display


def test_an_export_begins_where_nothing_can_be_locked(tmp_path: Path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(launch, "EXPORT", ("true",))
    assert launch.export(tmp_path / "run", tmp_path / "out", (), {}).process.wait() == 0
