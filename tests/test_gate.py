"""The gate: what fails once and then passes is listed and fails nothing; everything else that is wrong fails it."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JUDGE = ROOT / ".ci" / "judge.py"
PYTEST = shlex.join([sys.executable, "-P", "-m", "pytest"])
SETTINGS = """
[pytest]
addopts = --import-mode=importlib -p xdist -p timeout --strict-markers -m "not compile"
markers = compile
"""
HELPERS = """
import os, pathlib, subprocess, time
import pytest

def first_time(name):
    file = pathlib.Path(name)
    first = not file.exists()
    file.touch()
    return first
"""
SOUND = "def test_sound(): ...\n"
ABORT = "def test_abort(): os.abort()\n"
CHANCE = "def test_chance(): assert not first_time('chance')\n"
DYING = """
def pytest_sessionfinish():
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        os._exit(0)
"""
Gate = Callable[[list[str], dict[str, str]], tuple[int, list[str]]]


def environment() -> dict[str, str]:
    """Without what this pytest has set, and without plugins that take long to import."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return outside | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Judges commands in a project with these files: the exit status and the lines of output."""

    def run(commands: list[str], files: dict[str, str]) -> tuple[int, list[str]]:
        (tmp_path / "pytest.ini").write_text(SETTINGS)
        for name, text in files.items():
            file = tmp_path / "tests" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(HELPERS + text)
        command = [sys.executable, JUDGE, *commands]
        result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        print(result.stdout, result.stderr)
        return result.returncode, result.stdout.splitlines()

    return run


def section(lines: list[str], title: str) -> list[str]:
    """The lines under a heading of the summary."""
    heading = f" {title} ".center(80, "=")
    if heading not in lines:
        return []
    start = lines.index(heading) + 1
    return lines[start : lines.index("", start)]


def entries(lines: list[str], title: str) -> set[str]:
    """What is listed under a heading, without the failures that are quoted there."""
    return {line for line in section(lines, title) if not line.startswith(" ")}


def test_what_fails_once_is_listed_with_its_failure_and_fails_nothing(gate):
    files = {
        "test_names.py": r"""
@pytest.mark.parametrize("value", ["a b", "x::y", "'\"$(z)\\", "@[é]", "-n 2", "\n"])
def test_odd(value):
    assert not first_time(value.encode().hex()), "the first failure"
""",
        "test_around.py": """
@pytest.fixture
def before():
    assert not first_time("before")

@pytest.fixture
def after():
    yield
    assert not first_time("after")

def test_setup(before): ...
def test_teardown(after): ...
""",
        "test_marked.py": """
@pytest.mark.compile
def test_marked():
    assert not first_time("marked")
""",
        "test_sound.py": """
def test_environment():
    assert not {"PYTEST_PLUGINS", "PYTHONPATH", "OUTCOMES"} & set(os.environ)
""",
    }
    status, lines = gate([f"{PYTEST} -n 2", f"{PYTEST} -m compile"], files)
    assert status == 0
    odd = ["a b", "x::y", "'\"$(z)\\\\", "@[\\xe9]", "-n 2", "\\n"]
    assert entries(lines, "flaky") == {
        f"tests/{test}: failed, then passed"
        for test in (
            *(f"test_names.py::test_odd[{value}]" for value in odd),
            "test_around.py::test_setup",
            "test_around.py::test_teardown",
            "test_marked.py::test_marked",
        )
    }
    assert "    E       AssertionError: the first failure" in section(lines, "flaky")
    assert not section(lines, "failed")
    assert lines[-1] == "10 passed, 0 failed"


def test_what_fails_twice_or_cannot_be_chance_fails_the_gate(gate):
    files = {
        "test_plain.py": """
def test_wrong():
    assert False

def test_skipped_then():
    if not first_time("skipped"):
        pytest.skip()
    assert False

@pytest.fixture
def after():
    yield
    assert False

def test_teardown(after): ...

@pytest.mark.timeout(0.1)
def test_slow():
    if first_time("slow"):
        time.sleep(60)

def test_wait():
    assert not first_time("wait"), "not within 120 seconds: the run ends"

def test_process():
    if first_time("process"):
        subprocess.run(["sleep", "60"], timeout=0.1)

def test_sound(): ...

def test_chance():
    assert not first_time("chance")
""",
        "engine/test_threads.py": """
def test_race():
    assert not first_time("race"), "the first failure"
""",
        "train/test_lora_runs.py": """
def test_resume():
    assert not first_time("resume")
""",
    }
    status, lines = gate([PYTEST], files)
    assert status == 1
    assert entries(lines, "flaky") == {"tests/test_plain.py::test_chance: failed, then passed"}
    assert entries(lines, "failed") == {
        "tests/test_plain.py::test_wrong: failed, and did not pass when run again",
        "tests/test_plain.py::test_skipped_then: failed, and did not pass when run again",
        "tests/test_plain.py::test_teardown: failed, and did not pass when run again",
        "tests/test_plain.py::test_slow: timed out",
        "tests/test_plain.py::test_wait: timed out",
        "tests/test_plain.py::test_process: timed out",
        "tests/engine/test_threads.py::test_race: failed, then passed: a race",
        "tests/train/test_lora_runs.py::test_resume: failed, then passed: a race",
    }
    assert "    E       AssertionError: the first failure" in section(lines, "failed")
    assert lines[-1] == "2 passed, 8 failed"


def test_a_test_that_is_not_found_again_fails_the_gate(gate):
    vanishing = """
@pytest.mark.parametrize("time", [1] if first_time("vanished") else [2])
def test_vanishing(time):
    assert time == 2
"""
    status, lines = gate([PYTEST], {"test_plain.py": vanishing})
    assert status == 1
    vanished = "tests/test_plain.py::test_vanishing[1]: failed, and did not pass when run again"
    assert vanished in entries(lines, "failed")


@pytest.mark.sample(4, gate=8)
@pytest.mark.parametrize(
    ("command", "other", "reasons"),
    [
        pytest.param(f"{PYTEST} -n 1", {"test_b.py": ABORT}, ["crashed", "crashed"], id="worker"),
        pytest.param(
            f"{PYTEST} -n 1",
            {"conftest.py": DYING},
            ["crashed"],
            id="worker-after-its-tests",
        ),
        pytest.param(PYTEST, {"test_b.py": ABORT}, ["exit status -6 with 0 passed, 0 failed"], id="pytest"),
        pytest.param(PYTEST, {"test_b.py": "import nowhere"}, ["collection error"], id="import"),
        pytest.param(
            f"{PYTEST} -n 2",
            {"test_b.py": "@pytest.mark.parametrize('process', [os.getpid()])\ndef test_process(process): ..."},
            ["collection error"],
            id="different-tests",
        ),
        pytest.param(
            PYTEST,
            {"conftest.py": "def pytest_runtest_protocol(item): raise OSError"},
            ["internal error"],
            id="internal-error",
        ),
        pytest.param(f"{PYTEST} -k nothing", {}, ["exit status 5 with 0 passed, 0 failed"], id="no-tests"),
        pytest.param(
            PYTEST,
            {"conftest.py": "@pytest.fixture(autouse=True)\ndef none(): pytest.skip()"},
            ["exit status 0 with 0 passed, 0 failed"],
            id="all-skipped",
        ),
        pytest.param(f"false && {PYTEST}", {}, ["exit status 1 with 0 passed, 0 failed"], id="install"),
        pytest.param(f"{PYTEST}; false", {}, ["exit status 1 with 1 passed, 0 failed"], id="exit-status"),
        pytest.param(f"{PYTEST} -x", {"test_a.py": CHANCE + SOUND}, ["cut short"], id="cut-short"),
        *(
            pytest.param(
                PYTEST,
                {"test_a.py": CHANCE, "conftest.py": f"def {hook}(): raise OSError"},
                ["exit status 1 with 0 passed, 0 failed"],
                id=f"plugin-{hook}",
            )
            for hook in ("pytest_sessionfinish", "pytest_unconfigure")
        ),
    ],
)
def test_what_is_wrong_beside_the_tests_fails_the_gate(gate, command, other, reasons):
    status, lines = gate([command], {"test_a.py": SOUND, **other})
    assert status == 1
    assert sorted(entry.rpartition(": ")[2] for entry in entries(lines, "failed")) == reasons
    assert re.fullmatch(rf"[01] passed, {len(reasons)} failed", lines[-1])


def test_tests_that_show_races_are_listed():
    patterns = runpy.run_path(str(JUDGE))["RACES"]
    files = {file.relative_to(ROOT).as_posix(): file.read_text() for file in ROOT.glob("tests/**/test_*.py")}
    for pattern in patterns:
        assert any(fnmatchcase(file, pattern) for file in files), pattern
    for file, text in files.items():
        if re.search(r"\b(train_here|engine_of|make_engine)\(|\bruns\.run\(|\btrainers\.train\(", text):
            assert any(fnmatchcase(file, pattern) for pattern in patterns), file


def test_the_order_is_fixed_unless_a_flag_asks_for_a_random_one(tmp_path):
    file = tmp_path / "test_order.py"
    file.write_text("import pytest\n\n@pytest.mark.parametrize('number', range(9))\ndef test_number(number): ...\n")
    plain = [*shlex.split(PYTEST), "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-v", file]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def order(*flags: str) -> tuple[list[str], bool]:
        result = subprocess.run([*plain, *flags], cwd=tmp_path, env=outside, capture_output=True, text=True, check=True)
        return re.findall(r"test_number\[(\d)\] PASSED", result.stdout), "--randomly-seed=1" in result.stdout

    in_order = [str(number) for number in range(9)]
    assert order() == (in_order, False)
    shuffled, seed_shown = order("-p", "randomly", "--randomly-seed=1")
    assert seed_shown
    assert shuffled != in_order
    assert sorted(shuffled) == in_order
