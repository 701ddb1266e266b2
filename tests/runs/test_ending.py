"""How a run ended early."""

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.runs.folder.ending import ending_of, start_failure
from rptrain.runs.records import process
from rptrain.runs.records.process import ProcessId
from rptrain.runs.view.run_view import RunView

from ..refusals import refuse
from ..tui.recorded import GIB, make_run, snapshot


def dead(folder: Path, code: int | None = None, *, free: int = 74 * GIB, process: ProcessId | None = None) -> str:
    view = RunView(make_run(folder, steps=20, devices=1, alive=False))
    assert view.now is not None
    view.take_snapshot(replace(snapshot(("cuda:0",), view.now.time + 1, 0), free=free))
    view.process = process or view.process
    ending = ending_of(view, code)
    assert ending is not None
    return ending.cause


def test_a_sandbox_without_a_boot_id(monkeypatch: pytest.MonkeyPatch):
    read = Path.read_text

    def without(path: Path, *given: str, **named: str) -> str:
        return refuse(errno.ENOENT) if path.name == "boot_id" else read(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", without)
    process._boot_id.cache_clear()
    try:
        own = ProcessId.of(os.getpid())
        assert own.alive and not own.rebooted and not replace(own, birth="/1").alive
    finally:
        process._boot_id.cache_clear()


def test_a_run_that_goes_on_or_finished_has_none(tmp_path: Path):
    assert ending_of(RunView(make_run(tmp_path / "active", devices=1, steps=3))) is None
    assert ending_of(RunView(make_run(tmp_path / "done", devices=1, steps=3, end="finished"))) is None


def test_the_last_save_and_what_is_lost(tmp_path: Path):
    run = make_run(tmp_path, steps=47, devices=1, end="failed")
    for step, complete in ((10, True), (40, True), (45, False)):
        folder = run / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir()
        if complete:
            (folder / MANIFEST).touch()
    view = RunView(run)
    ending = ending_of(view)
    assert ending is not None and (ending.saved, ending.lost) == (40, 7)
    assert ending.cause == "EngineError: cuda:1 fell off the bus" and ending.seen == view.last_event
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    ending = ending_of(view)
    assert ending is not None and (ending.saved, ending.lost) == (0, 47)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "ended by SIGSEGV"),
        (-signal.SIGRTMIN - 5, f"ended by signal {signal.SIGRTMIN + 5}"),
        (-signal.SIGKILL, "killed (SIGKILL)"),
    ],
)
def test_how_the_process_ended(tmp_path: Path, code: int, said: str):
    assert said in dead(tmp_path, code)


def test_memory_that_ran_out_is_the_probable_cause_only_if_little_was_left(tmp_path: Path):
    for name, code in (("known", -signal.SIGKILL), ("unknown", None)):
        assert "Only 1.00 GiB of host memory was left" in dead(tmp_path / name / "low", code, free=GIB)
        enough = dead(tmp_path / name / "enough", code, free=40 * GIB)
        assert "kill -9" in enough and "Shortly before, 40.0 GiB of host memory was left." in enough
    assert "Only" not in dead(tmp_path / "other", -signal.SIGSEGV, free=GIB)


def test_a_machine_that_was_restarted_and_another_one(tmp_path: Path):
    own = ProcessId.of(os.getpid())
    before = dead(tmp_path / "before", process=replace(own, birth="another boot/17"))
    assert before == "The machine was restarted while the run was active."
    since = dead(tmp_path / "since", process=replace(own, birth=f"{own.birth.partition('/')[0]}/0"))
    assert "was ended without a last record" in since
    assert "The trainer on node-7" in dead(tmp_path / "far", process=ProcessId("node-7", 1, ""))


@pytest.mark.parametrize(
    ("code", "cause"),
    [(7, "exit status 7"), (-signal.SIGTERM, "the trainer was ended by SIGTERM while starting")],
)
def test_a_trainer_that_ended_while_starting(code: int, cause: str):
    assert start_failure(code, 0) == cause
