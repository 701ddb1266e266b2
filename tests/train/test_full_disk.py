"""A disk that is full at a write: the run names the file, leaves no half file, and later ends with the same weights."""

import builtins
import errno
import io
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

import pytest

from rptrain.checkpoint.export import export
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.tui.services.preferences import save_theme

from .. import run_tools as tools
from ..cases import grid, long
from ..checkpoints import verify_checkpoint

SAVES = "save.save_steps=2"
LORA = ("lora.r=2", "model.dtype=float32")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, bytes]]:
    """The state of a run that nothing happened to; each is trained once."""

    def state(*settings: str) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("whole")
        tools.write_model(folder / "model")
        return tools.state(tools.train_here(folder, *settings))

    return cache(state)


@pytest.fixture
def disk() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def fill(disk: pytest.MonkeyPatch, pattern: str) -> list[str]:
    """The disk is full for files and folders whose paths match: files can be opened, but not written to.

    Returns a list that these paths are added to.
    """
    met: list[str] = []

    def is_full(path: Any) -> bool:
        if not isinstance(path, str | os.PathLike) or not re.search(pattern, os.fspath(path)):
            return False
        met.append(os.fspath(path))
        return True

    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path: Any, mode: str = "r", *rest: Any, open: Any = io.open, **named: Any) -> Any:
        file = open(path, mode, *rest, **named)
        if set(mode) & set("wxa+") and is_full(path):
            file.write = refuse
        return file

    def made(path: Any, *rest: Any, mkdir: Any = os.mkdir, **named: Any) -> None:
        if is_full(path):
            raise OSError(errno.ENOSPC, "No space left on device", os.fspath(path))
        mkdir(path, *rest, **named)

    disk.setattr(io, "open", opened)
    disk.setattr(builtins, "open", opened)
    disk.setattr(os, "mkdir", made)
    return met


def check_folder(run: RunDir) -> None:
    """Nothing in the run's folder is incomplete under its final name."""
    for checkpoint in run.checkpoints_path.glob("checkpoint-*"):
        verify_checkpoint(checkpoint)
    assert not list(run.path.rglob("*.part"))


# Places at which the run cannot begin, with the path in the message.
BEGINNINGS = [
    (r"/runs$", "/runs: No space left"),
    (r"/runs/run$", "/runs: No space left"),
    (r"/checkpoints$", "/runs: No space left"),
    (r"/runs/run/\.rptrain-\w+\.part$", "/runs/run/config.toml: No space left"),
]


@pytest.mark.sample(2, gate=4)
@pytest.mark.parametrize(("pattern", "said"), BEGINNINGS, ids=["output", "run", "checkpoints", "config"])
def test_a_run_that_cannot_begin(folder, disk, pattern, said):
    tools.write_config(folder)
    met = fill(disk, pattern)
    told = tools.invoke("--config", folder / "run.toml")
    assert met and told.exit_code in (1, 2) and said in told.stderr, told.stderr
    assert not (folder / "runs/run").exists()
    disk.undo()
    assert tools.train_here(folder).path.name == "run"


# Places that end the run: the files, settings, and the step to resume from.
ENDINGS = [
    (r"\.checkpoint-6\..*/units/00001", (), 4),
    (r"\.checkpoint-6\..*/units/.*-layers", LORA, 4),
    (r"\.checkpoint-6\..*/base/tokenizer\.json$", (), 4),
    (r"\.checkpoint-6\..*/trainer_state\.json$", (), 4),
    (r"\.checkpoint-6\..*/complete\.json$", (), 4),
    (r"/\.checkpoint-6\.rptrain-partial$", (), 4),
    (r"/\.model\.rptrain-partial$", (), 6),
    (r"/\.model\..*/model\.safetensors$", (), 6),
    (r"/\.model\..*/tokenizer\.json$", (), 6),
    (r"/\.model\..*/complete\.json$", (), 6),
    (r"/\.model\..*/config\.json$", (), 6),
    (r"/\.model\..*/adapter_model\.safetensors$", LORA, 6),
    (r"/\.model\..*/adapter_config\.json$", LORA, 6),
]
FAST, LONG = (3, 7), (1, 5, 6, 9, 11)


@pytest.mark.parametrize(
    ("pattern", "settings", "step"),
    [each if number in FAST else (long if number in LONG else grid)(*each) for number, each in enumerate(ENDINGS)],
    ids=[re.sub(r"[\\$]|\.\*", "", pattern.rpartition("/")[2]) for pattern, *_ in ENDINGS],
)
def test_a_run_that_ends_and_is_resumed(folder, expected, disk, pattern, settings, step):
    tools.write_config(folder)
    met = fill(disk, pattern)
    told = tools.invoke("--config", folder / "run.toml", SAVES, *settings)
    run = RunDir(folder / "runs/run")
    assert met and told.exit_code == 1, told.output
    assert re.search(pattern.rstrip("$") + r".*: No space left", told.stderr), told.stderr
    assert f"checkpoint-{step} is complete: fix the problem, then resume from it with" in told.stderr
    assert ("Training is complete" in told.stderr) == (step == 6)
    last = list(events.read(run.events_path))[-1]
    assert isinstance(last, events.Failed) and "No space left" in last.message
    assert not run.model_path.exists()
    check_folder(run)
    disk.undo()
    again = tools.train_here(folder, SAVES, *settings)
    assert again == run and run.finished and tools.state(run) == expected(*settings)
    assert [event.step for event in tools.events(run, events.Resumed)] == [step]


# Places without which the run goes on, and what is said.
OTHERS = [
    (r"/lanes\.jsonl$", ""),
    (r"/events\.jsonl$", r"events\.jsonl cannot be written: No space left on device"),
    (r"/\.checkpoint-2\..*/units/", r"\.checkpoint-2\..*: No space left on device"),
    (r"/control$", r"control cannot be created: No space left on device"),
]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [each if number == 1 else long(*each) for number, each in enumerate(OTHERS)],
    ids=["lanes", "events", "save", "control"],
)
def test_a_run_that_goes_on(folder, expected, disk, caplog, pattern, said):
    tools.write_config(folder)
    met = fill(disk, pattern)
    told = tools.invoke("--config", folder / "run.toml", SAVES)
    run = RunDir(folder / "runs/run")
    assert met and told.exit_code == 0, told.output
    assert re.search(said, told.output + caplog.text), told.output
    check_folder(run)
    assert tools.state(run) == expected()
    disk.undo()
    if not run.finished:  # the record of its end was lost, so it is exported once more
        assert tools.train_here(folder, SAVES) == run and run.finished and tools.state(run) == expected()


@pytest.mark.long
@pytest.mark.parametrize("name", ["model.safetensors", grid("config.json"), grid("tokenizer.json"), "complete.json"])
def test_an_export(folder, disk, name):
    run = tools.train_here(folder, "train.max_steps=1")
    met = fill(disk, rf"/\.to\..*/{re.escape(name)}$")
    told = tools.invoke("export", run.path, "--to", folder / "to")
    assert met and told.exit_code == 1 and f"/{name}: No space left on device: free disk space" in told.stderr
    assert not [path for path in folder.iterdir() if path.name.startswith(("to", ".to"))]
    disk.undo()
    assert export(run.path, folder / "to").is_dir()


@pytest.mark.parametrize("command", ["--svg", "--trace"])
def test_drawings_of_a_plan(folder, disk, command):
    tools.write_config(folder)
    met = fill(disk, r"/\.rptrain-\w+\.part$")
    told = tools.invoke("plan", "--config", folder / "run.toml", command, folder / "drawn")
    assert met and told.exit_code == 2 and f"{folder / 'drawn'} cannot be written: No space left" in told.stderr
    assert not (folder / "drawn").exists() and not list(folder.glob("*.part"))


@pytest.mark.long
def test_tokens_that_cannot_be_cached(folder, disk):
    """The run has not begun, and the message says how to go on."""
    tools.write_config(folder)
    (folder / "kept").mkdir()
    (folder / "data.jsonl").write_text('{"text": "two and two is four"}\n' * 100)
    line = "--config", folder / "run.toml", f"data.train.0.path={folder}/data.jsonl", f"data.cache_dir={folder}/kept"
    met = fill(disk, "/kept$")
    told = tools.invoke(*line)
    said = f"{folder}/kept: the token cache cannot be written: No space left on device; free disk space (its"
    assert met and told.exit_code == 2 and said in told.stderr, told.stderr
    assert not (folder / "runs").exists() and not list((folder / "kept").iterdir())
    disk.undo()
    assert tools.invoke(*line).exit_code == 0


def test_preferences_stay(tmp_path, disk):
    file = tmp_path / "tui.toml"
    file.write_text('models = ["a"]\n')
    met = fill(disk, r"/\.rptrain-\w+\.part$")
    with pytest.raises(OSError, match=r"No space left on device: .*tui\.toml"):
        save_theme(file, "light")
    assert met and file.read_text() == 'models = ["a"]\n' and list(tmp_path.iterdir()) == [file]
