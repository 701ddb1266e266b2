"""What Run says of a run that did not start, failed or died, and where its keys lead."""

import time
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.outcomes import died
from rptrain.tui.run.banner import Banner
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.services import launch

from .conftest import Made, Scripted, driven, notified, press_until, screen_text, until
from .recorded import BEGAN, make_run

pytestmark = pytest.mark.long


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [(60, 24), (80, 24), (200, 50)])
@driven
async def test_a_failed_start_says_why_and_leads_back_to_its_setting(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
):
    said = "echo 'reading the data'; echo '`optim.warmup_steps` must be smaller, not [red]9'; exit 2"
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", said))
    app = make()
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "fits" in screen_text(app))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, RunScreen) and "✗ Training failed" in screen_text(app))
        text = " ".join(screen_text(app).split())
        assert "✗ Training failed to start: `optim.warmup_steps` must be smaller, not [red]9" in text
        assert "esc: correct it at optim.warmup_steps in New run" in text
        await press_until(pilot, "escape", lambda: isinstance(app.screen, NewRun))
        await until(pilot, lambda: app.focused is not None and app.focused.id == "optim-warmup_steps")


@driven
async def test_a_failed_start_for_another_reason_leads_back_to_new_run(
    make: Made, helper: Scripted, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "exit 7"))
    app = make()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "fits" in screen_text(app))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "✗ Training failed to start: exit status 7" in screen_text(app))
        assert "esc: correct it in New run" in screen_text(app)
        await press_until(pilot, "escape", lambda: isinstance(app.screen, NewRun))


@driven
async def test_a_trainer_that_is_killed_while_starting_is_named_so(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "echo reading the data; kill -9 $$"))
    monkeypatch.setattr("rptrain.runs.folder.ending.VMSTAT", vmstat := tmp_path / "vmstat")
    vmstat.write_text("pgfault 7\noom_kill 3\n")
    killed = "✗ Training failed to start: the trainer was killed (SIGKILL) while starting"
    app = make()
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, lambda: "fits" in screen_text(app))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: killed in screen_text(app))
        assert "memory ran out" not in screen_text(app)
        vmstat.write_text("pgfault 8\noom_kill 4\n")
        ran_out = f"{killed}, for example by the kernel because host memory ran out"
        await until(pilot, lambda: ran_out in screen_text(app))


@driven
async def test_a_dead_run_says_what_is_lost_and_how_to_resume(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    run = make_run(tmp_path / "runs", steps=20, alive=False)
    (run / "checkpoints" / "checkpoint-15").mkdir()
    (run / "checkpoints" / "checkpoint-15" / MANIFEST).touch()
    monkeypatch.setattr(launch, "COMMAND", ("sh", "-c", "echo cannot; exit 2"))
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await until(pilot, lambda: "✗ The trainer was ended without a last record" in screen_text(app))
        assert "r resumes from step 15 · 5 steps lost · last seen 2023-11-14 22:14:40" in screen_text(app)
        await pilot.press("r")
        await until(pilot, lambda: "✗ Training failed to start: cannot" in screen_text(app))
        assert "r tries again" in screen_text(app)
        await press_until(pilot, "escape", lambda: not isinstance(app.screen, RunScreen))
        assert not isinstance(app.screen, NewRun)


@driven
async def test_a_run_whose_folder_is_deleted_says_so_and_offers_no_key_that_needs_it(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=20)
    async with make(attach=run).run_test(size=(80, 24)) as pilot:
        app = pilot.app
        await until(pilot, lambda: "training" in screen_text(app) and "e export" in screen_text(app).splitlines()[-1])
        view = app.screen._view
        assert isinstance(app.screen, RunScreen) and view is not None and view.process is not None
        rmtree(run)
        view.process = replace(view.process, birth="another")  # the trainer ends
        await until(pilot, lambda: "does not exist any more" in screen_text(app))
        assert "20 steps lost · esc leads back" in screen_text(app)
        keys = screen_text(app).splitlines()[-1]
        assert "back" in keys and not any(word in keys for word in ("export", "resume", "chat", "replay"))
        await press_until(pilot, "escape", lambda: not isinstance(app.screen, RunScreen))


@driven
async def test_a_run_that_died_is_mentioned_at_the_start(make: Made, tmp_path: Path):
    make_run(tmp_path / "runs", "older", steps=4, alive=False, began=BEGAN - 1e5)
    run = make_run(tmp_path / "runs", steps=20, alive=False)
    (run / "checkpoints" / "checkpoint-15").mkdir()
    (run / "checkpoints" / "checkpoint-15" / MANIFEST).touch()
    said = "llama ended without a last record after step 20: press F3, then r resumes it from step 15"
    async with make().run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: notified(pilot.app) == said)
    make_run(tmp_path / "runs", "newer", steps=4, end="finished", began=BEGAN + 1e5)
    assert died(tmp_path / "runs") is None and died(tmp_path) is None


@driven
async def test_a_run_without_a_checkpoint_is_begun_again(make: Made, tmp_path: Path):
    run = make_run(tmp_path / "runs", steps=20, end="failed")
    async with make(attach=run).run_test(size=(120, 36)) as pilot:
        app = pilot.app
        await until(pilot, lambda: "✗ EngineError: cuda:1 fell off the bus" in screen_text(app))
        assert "not saved: 20 steps lost · n begins a new run" in screen_text(app)
        bound = {active.binding.action for active in app.screen.active_bindings.values()}
        assert "replay" in bound and not bound & {"export", "resume", "chat"}
        await press_until(pilot, "v", lambda: not app.screen.query_one(Banner).display)
        await press_until(pilot, "escape", lambda: app.screen.query_one(Banner).display)
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, NewRun) and "1000" in screen_text(app))
