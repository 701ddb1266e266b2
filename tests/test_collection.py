"""Collecting the tests gives the same ids and parameters in every process, prints nothing and leaves nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = "tests.recollect", "no:randomly", "no:syrupy", "no:cacheprovider"
COMMAND = [
    *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-s", "-m", "", "--assert=plain"),
    *(word for plugin in PLUGINS for word in ("-p", plugin)),
]
PLACES = {
    "here": {"PYTHONHASHSEED": "1", "CLOCK_AHEAD": "0", "TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8"},
    "there": {"PYTHONHASHSEED": "2", "CLOCK_AHEAD": "4e7", "TZ": "America/St_Johns", "LC_ALL": "C", "PYTHONUTF8": "0"},
}
PLAIN = re.compile(r"[^\[]+(\[[A-Za-z0-9_.-]{1,120}\])?")


@pytest.mark.long
def test_every_process_collects_the_same(tmp_path):
    """Two processes at once, with different hash seeds, clocks, time zones, locales, homes and temporary folders."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    running = {}
    for name, place in PLACES.items():
        folder = tmp_path / name
        (folder / "home").mkdir(parents=True)
        (folder / "tmp").mkdir()
        folders = {"HOME": f"{folder}/home", "TMPDIR": f"{folder}/tmp", "COLLECTED": f"{folder}/collected"}
        env = inherited | place | folders
        with (folder / "printed").open("w") as file:
            running[folder] = subprocess.Popen(COMMAND, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    failed = [(folder / "printed").read_text() for folder, process in running.items() if process.wait() != 0]
    assert failed == []

    here, there = [(folder / "collected").read_text().splitlines() for folder in running]
    ids = [line.partition("\t")[0] for line in here]
    assert len(ids) > 1000
    assert [pair for pair in zip(here, there, strict=True) if pair[0] != pair[1]] == []
    assert [name for name in ids if not PLAIN.fullmatch(name)] == []
    for folder in running:
        assert (folder / "printed").read_text().splitlines()[: len(ids)] == ids
        assert [*(folder / "home").rglob("*"), *(folder / "tmp").rglob("*")] == []
