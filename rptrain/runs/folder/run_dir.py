"""The folder of a run: its config, its events, its checkpoints and the trained model."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rptrain.checkpoint.atomic_dir import (
    MANIFEST,
    Damaged,
    check_free,
    complete_checkpoints,
    set_aside,
    unusable_checkpoints,
)
from rptrain.checkpoint.metadata import CHECKPOINTS, EVENTS, RUN_CONFIG, read_facts
from rptrain.config.errors import dotted, leaves, shown
from rptrain.config.resolve import Resolved, read_text, render, resolve
from rptrain.config.schema import AUTOMATIC, Config
from rptrain.runs.folder.control import FOLDER
from rptrain.runs.folder.event_log import EventLog, has_saved, is_finished
from rptrain.runs.records.process import FOLDER as PROCESSES
from rptrain.utils.errors import UserError
from rptrain.utils.paths import inside, writable_place
from rptrain.utils.replacing import PARTIAL, remove_unfinished, replace_file

log = logging.getLogger(__name__)

RESTART = "save.resume=never or another log.run_name"

# Keys that earlier versions wrote at the start of a line of a run's config. No other table has keys of these names.
_NEW_NAMES = {"alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora"}
_RENAMED = re.compile(rf"^(?:{'|'.join(_NEW_NAMES)})\b(?= =)", re.MULTILINE)
_REMOVED = re.compile(r"^double_quant = false\b.*$", re.MULTILINE)

# A resumed run may change these keys: they do not affect the numbers, only say when to stop, or affect the data alone,
# which is compared. All others are fixed.
_FREE = re.compile(
    r"(save|log|eval)\..*|data\.(cache_dir|follow_links|max_bad_rows|reasoning)|model\.(hold|follow_links)|"
    r"optim\.max_skipped_steps|"
    r"train\.(max_steps|num_epochs|eval_steps|eval_on_start|early_stopping_patience)|"
    r"engine\.(devices|vram_limit|host_limit|optimizer_threads|replan|stall_action|stall_timeout|trace)"
)
# The processes that train a run together may differ in these keys: each has its own devices, memory and folders.
OWN = re.compile(
    r"engine\.(devices|vram_limit|host_limit|optimizer_threads|stall_action|stall_timeout)|log\.(?!sample_prompts).*|"
    r"data\.(cache_dir|follow_links)|model\.follow_links|save\.(resume|output_dir)"
)


@dataclass(frozen=True)
class RunDir:
    """The layout of a run's folder, which may be a link.

    UserError from any property whose file or folder is a link that leads out of the run's folder.
    """

    path: Path

    @classmethod
    def create(cls, output_dir: Path | str, run_name: str) -> Self:
        """Creates a folder that only its owner can read: `run_name`, or `run_name` with -2, -3, … if that exists.

        UserError if it cannot be created.
        """
        parent, number = Path(output_dir), 1
        try:
            parent.mkdir(parents=True, exist_ok=True)
            while True:
                run = cls(parent / (run_name if number == 1 else f"{run_name}-{number}"))
                try:
                    run.path.mkdir(mode=0o700)
                except FileExistsError:
                    number += 1
                    continue
                try:
                    run.checkpoints_path.mkdir(mode=0o700)
                except OSError:
                    run.path.rmdir()
                    raise
                return run
        except (OSError, ValueError) as error:
            raise _not_created(parent, error) from error

    @classmethod
    def open(cls, path: Path | str) -> Self:
        run = cls(Path(path))
        if not run.config_path.is_file():
            raise UserError(f"{path} is not a run: it has no {RUN_CONFIG}")
        return run

    @property
    def config_path(self) -> Path:
        return inside(self.path, RUN_CONFIG)

    @property
    def events_path(self) -> Path:
        return inside(self.path, EVENTS)

    @property
    def checkpoints_path(self) -> Path:
        return inside(self.path, CHECKPOINTS)

    @property
    def control_path(self) -> Path:
        return inside(self.path, FOLDER)

    @property
    def model_path(self) -> Path:
        return inside(self.path, "model")

    def of_process(self, rank: int) -> Self:
        """Where process `rank` keeps its events and lanes, if several train the run. The first one keeps them in the
        run's folder.
        """
        return type(self)(inside(self.path, f"{PROCESSES}/{rank}")) if rank else self

    def check_folders(self) -> None:
        """UserError if a file, or a folder that rptrain did not create, is where training writes a folder."""
        for folder in (self.checkpoints_path, self.control_path, self.model_path):
            if os.path.lexists(folder) and not folder.is_dir():
                raise UserError(f"{folder} is in the way of a folder that training writes: move it away")
        check_free(self.model_path)
        for partial in self.checkpoints_path.glob(f".checkpoint-*{PARTIAL}"):
            check_free(partial.with_name(partial.name.removeprefix(".").removesuffix(PARTIAL)))

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_path / f"checkpoint-{step}"

    def checkpoint_at(self, path: Path) -> Path:
        """The path of a checkpoint of this run. UserError if it is a link that leads out of the run's folder."""
        return inside(self.path, path.relative_to(self.path))

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, ordered by step."""
        return complete_checkpoints(self.checkpoints_path)

    @property
    def saved_step(self) -> int:
        """The step of the last complete checkpoint; 0 if there is none."""
        saved = self.checkpoints()
        return int(saved[-1].name.rpartition("-")[2]) if saved else 0

    @property
    def began_saving(self) -> bool:
        """Whether the run has checkpoints, complete or not, or its events say that it saved some."""
        there = self.checkpoints() or unusable_checkpoints(self.checkpoints_path)
        return bool(there) or (self.events_path.is_file() and has_saved(self.events_path))

    def newest(self) -> Path | None:
        """The last complete checkpoint that is not damaged, as far as `read_facts` can check quickly.

        None if the run never saved. Damaged, with what is wrong with each checkpoint, if none can be used.
        """
        damaged: list[Damaged] = []
        for path in reversed(self.checkpoints()):
            try:
                read_facts(self.checkpoint_at(path))
            except Damaged as error:
                damaged.append(error)
                continue
            return path
        if damaged or self.began_saving:
            raise self.all_damaged(damaged)
        return None

    def all_damaged(self, damaged: Sequence[Damaged]) -> Damaged:
        """The error for a run that has no checkpoint to resume from. `damaged`: what is wrong with complete ones."""
        reasons = [*map(str, damaged), *unusable_checkpoints(self.checkpoints_path).values()]
        reasons = reasons or [f"{self.checkpoints_path} has none of those that were saved"]
        return Damaged(
            "\n".join(
                (
                    f"{self.path} cannot be resumed, because it has no complete checkpoint that is undamaged. "
                    f"Restore one from a copy, or start a new run with {RESTART}. What is wrong with each:",
                    *(f"  {reason}" for reason in reasons),
                )
            )
        )

    @property
    def finished(self) -> bool:
        return self.events_path.is_file() and is_finished(self.events_path)

    def config(self) -> Config:
        return resolve_config(self.config_path).config

    def write_config(self, resolved: Resolved) -> None:
        """Replaces the config atomically."""
        replace_file(self.config_path, render(resolved).encode())


def check_creatable(output_dir: Path | str, run_name: str) -> None:
    """UserError if a run could not be created, as far as can be told without writing."""
    parent = Path(output_dir)
    try:
        place = writable_place(parent)
        most = os.pathconf(place, "PC_NAME_MAX")  # not positive: some FUSE file systems do not tell
        if 0 < most < len(os.fsencode(run_name)):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.lstat(place / run_name)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _not_created(parent, error) from error


def _not_created(parent: Path, error: OSError | ValueError) -> UserError:
    """The error for a run whose folder cannot be created. A name with a null character is a ValueError."""
    reason = getattr(error, "strerror", None) or error
    return UserError(f"cannot create a run in {parent}: {reason}; change save.output_dir or log.run_name")


def resolve_config(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """As `resolve`, but accepts the old names of keys in the config of a run that an earlier version wrote."""
    text = None
    if path.name == RUN_CONFIG and RunDir(path.parent).events_path.is_file():
        text = _RENAMED.sub(lambda match: _NEW_NAMES[match[0]], _REMOVED.sub("", read_text(path)))
    return resolve(path, overrides, text)


def checkpoint_of(path: Path | str) -> tuple[RunDir, Path]:
    """The run and the checkpoint that a path names. The path of a run stands for its last complete checkpoint."""
    path = Path(path)
    if (path / RUN_CONFIG).is_file():
        run = RunDir.open(path)
        if newest := run.newest():
            return run, newest
        raise UserError(f"{path} has no checkpoint")
    path = path.resolve()
    run = RunDir(path.parent.parent)
    if path.parent == run.checkpoints_path and run.config_path.is_file():
        if path in run.checkpoints():
            return run, path
        raise UserError(f"{path} is not complete: there is no {MANIFEST} in it, or the folder was renamed")
    raise UserError(f"{path} is neither a run nor a checkpoint of one")


def find(resolved: Resolved, *, warn: bool = True) -> tuple[RunDir, Path] | None:
    """The run and the checkpoint to resume from according to `save.resume`, or None to start a new run.

    For a run, the checkpoint is the newest one that is not damaged. With `warn`, a warning names the damaged ones after
    it. UserError if `save.resume` names neither a run nor a checkpoint, or if the config would change the run's
    numbers.
    """
    config = resolved.config
    if config.save.resume == "never":
        return None
    try:
        found = _unfinished(config) if config.save.resume == "auto" else checkpoint_of(config.save.resume)
    except OSError as error:  # usually the run of another user
        raise UserError(
            f"an unfinished run cannot be read: {error.filename}: {error.strerror}; make it readable, set another "
            "log.run_name or save.output_dir, or start a new run with save.resume=never"
        ) from error
    if found is not None and (changes := changed(found[0].config(), config)):
        raise UserError(
            f"{found[0].path} cannot be resumed with changed settings: {'; '.join(changes)}. "
            f"Set them back, or start a new run with {RESTART}"
        )
    if warn and found is not None and not forks(*found):
        for path in _after(*found):
            log.warning("%s is damaged: using the checkpoint before it", path)
    return found


def begin(
    resolved: Resolved, found: tuple[RunDir, Path] | None, log: EventLog | None = None
) -> tuple[RunDir, Path | None, EventLog]:
    """Resumes the run that `find` found, or creates a new run, and writes its config. Returns the run, the checkpoint
    and the run's log, which the caller closes.

    A checkpoint that is not the run's newest starts a new run, and the later ones stay unchanged. Otherwise damaged
    checkpoints after it are renamed. `log`: that of a run to resume, held so that nobody else trains it.
    """
    config = resolved.config
    if found is None or forks(*found):
        parent = Path(config.save.output_dir)
        missing = [folder for folder in (parent, *parent.parents) if not os.path.lexists(folder)]
        with ExitStack() as undo:  # after any error: a folder without its config is not a run
            for folder in reversed(missing):
                undo.callback(_remove_empty, folder)
            run = RunDir.create(parent, config.log.run_name or "run")
            undo.callback(shutil.rmtree, run.path, ignore_errors=True)
            log = EventLog(run.events_path)
            undo.callback(log.close)
            run.write_config(resolved)
            undo.pop_all()
        return run, found[1] if found else None, log
    run, checkpoint = found
    log = log or EventLog(run.events_path)
    remove_unfinished(run.path)
    named = config.log.model_copy(update={"run_name": run.config().log.run_name})
    run.write_config(replace(resolved, config=config.model_copy(update={"log": named})))
    for path in _after(run, checkpoint):
        set_aside(path)
    return run, checkpoint, log


def forks(run: RunDir, checkpoint: Path) -> bool:
    """Whether training from the checkpoint starts a new run, because its run has a newer checkpoint."""
    newest = run.newest()
    return newest is not None and checkpoint.name != newest.name


def changed(old: Config, new: Config, free: re.Pattern[str] = _FREE) -> list[str]:
    """The keys, with both values, that would make `new` train to other numbers than `old`: all but the `free` ones.

    A value that is "auto" in `new` keeps the value with which the run started. A [lora] table that only one of them has
    is one entry.
    """
    before, after = _flat(old), _flat(new)
    if (old.lora is None) != (new.lora is None):
        before, after = _with_whole_lora(before), _with_whole_lora(after)
    return [
        f"{key} was {shown(before.get(key))}, is {shown(after.get(key))}"
        for key in before | after
        if before.get(key) != after.get(key)
        and not free.fullmatch(key)
        and not (key in AUTOMATIC and after.get(key) == "auto")
    ]


def _unfinished(config: Config) -> tuple[RunDir, Path] | None:
    """The newest unfinished run with the config's run name that has saved, and its newest undamaged checkpoint.

    UserError if it cannot be resumed, also if all its checkpoints are damaged.
    """
    name = config.log.run_name or "run"
    runs: dict[int, RunDir] = {}
    for path in _folders(Path(config.save.output_dir)):
        if match := re.fullmatch(re.escape(name) + r"(?:-([2-9]|[1-9]\d+))?", path.name):
            runs[int(match[1] or 1)] = RunDir(path)
    for _, run in sorted(runs.items(), reverse=True):
        if run.finished or not run.began_saving:
            continue
        if not run.config_path.is_file():
            raise UserError(
                f"{run.path} cannot be resumed: it has no {run.config_path.name}. Restore it from a copy, or start "
                f"a new run with {RESTART}"
            )
        try:
            config = run.config()
        except UserError as error:
            raise UserError(f"{run.path} cannot be resumed: {error}. Start a new run with {RESTART}") from None
        if config.log.run_name != name:
            continue
        newest = run.newest()
        assert newest is not None  # a run that has saved
        return run, newest
    return None


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _after(run: RunDir, checkpoint: Path) -> list[Path]:
    """The complete checkpoints after a checkpoint."""
    paths = run.checkpoints()
    return paths[[path.name for path in paths].index(checkpoint.name) + 1 :]


def _folders(path: Path) -> list[Path]:
    return [inner for inner in path.iterdir() if inner.is_dir()] if os.path.isdir(path) else []


def _with_whole_lora(flat: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in flat.items() if not key.startswith("lora.")}
    return others | {"lora": {} if len(others) < len(flat) else None}


def _flat(config: Config) -> dict[str, Any]:
    dump = config.model_dump(mode="json")
    flat = {}
    for key in leaves(dump):
        value: Any = dump
        for part in key:
            value = value[part]
        flat[dotted(key)] = value
    return flat
