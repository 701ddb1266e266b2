"""What was left by earlier runs and other programs: tokenized data, locks, and folders in the place of outputs."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from benchmarks.bad_inputs.case import TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import link, text
from benchmarks.bad_inputs.sound import CONFIG, TOKENS

AREA = "left over"
_held: list[IO[bytes]] = []  # the file that a case keeps locked, until the next one does


def tokens(change: Callable[[bytes], bytes]) -> Edit:
    """The tokens of the sound data, changed, in the cache."""

    def edit(folder: Path) -> None:
        cache = folder.parent / "home/.cache/rptrain"
        shutil.copytree(folder.parent / TOKENS, cache)
        for file in filter(Path.is_file, cache.iterdir()):  # a slow machine has a folder of digests beside them
            file.chmod(0o600)
            file.write_bytes(change(file.read_bytes()))

    return edit


def locked(folder: Path) -> None:
    """The events of an unfinished run, held as its process holds them."""
    (folder / "runs/r").mkdir()
    file = (folder / "runs/r/events.jsonl").open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    _held[:] = [file]


CASES: tuple[tuple[int, str, tuple[str, ...], tuple[Edit, ...], Outcome], ...] = (
    (756, "output folder that links outside", ("save.output_dir=l",), (link("l", "../outside/folder"),), "either"),
    (757, "link to nothing of the run's name", (), (link("runs/r", "nope"),), "either"),
    (758, "tokens of other bytes", (), (tokens(lambda data: b"\1" * len(data)),), "either"),
    (759, "tokens cut short", (), (tokens(lambda data: data[:-100]),), "either"),
    (
        760,
        "tokens beyond the vocabulary",
        (),
        (tokens(lambda data: data[: 1 << 16] + b"\x7f" * (len(data) - (1 << 16))),),
        "either",
    ),
    (761, "events that another process has locked", (), (locked,), "taken"),
    (768, "a folder of the user of the run's name", (), (text("runs/r/notes.txt", "notes"),), "either"),
)
ODD = "a\x07b.toml"


def cases() -> Iterator[Case]:
    for number, name, overrides, edits, expected in CASES:
        makes = ("runs", "../outside/folder") if number == 756 else None  # the user's choice
        yield Case(number, AREA, name, (*TRAIN, *overrides), expected, edits, makes=makes)
    train = ("--config", ODD, "log.run_name=y")
    resume = (*train, "save.resume=runs/y", "train.max_steps=3")
    edits = (text(ODD, CONFIG),)
    name = "run of a config with a control character in its name"
    yield Case(747, AREA, name, resume, "taken", edits, changes=("runs/y",), first=train)
