"""A bad input: the files that it needs, the command that reads them, and the outcome that it must have."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["refused", "taken", "either", "diverged"]
Edit = Callable[[Path], object]  # changes the files of a case, whose working folder it is given

# The exit codes that each outcome allows. A run that diverges ends with 1 and a message.
CODES: dict[Outcome, tuple[int, ...]] = {
    "refused": (2,),
    "taken": (0,),
    "either": (0, 2),
    "diverged": (0, 1, 2),
}

TRAIN = ("--config", "r.toml")
CHECK = (*TRAIN, "--dry-run")
PLAN = ("plan", *TRAIN)
GENERATE = ("generate", "model", "--prompt", "hi", "--max-new-tokens", "3")
RUN_GENERATE = ("generate", "runs/x", "--prompt", "hi", "--max-new-tokens", "2")
RUNS = ("runs",)


@dataclass(frozen=True)
class Case:
    """Paths are relative to the working folder, which `sound.py` describes."""

    number: int  # stays with the case
    area: str
    name: str
    args: tuple[str, ...]
    expected: Outcome = "refused"
    edits: tuple[Edit, ...] = ()
    names: str = ""  # text that a refusal must contain, such as the key or the file that is wrong
    says: str = ""  # text that the output must contain
    makes: tuple[str, ...] | None = None  # where files may appear; None: where the command writes by default
    changes: tuple[str, ...] = ()  # where files that were there may change or vanish
    fresh: bool = False  # needs a process of its own instead of a fork
    as_user: bool = False  # file permissions apply to the command, even if the caller is root
    stdin: bytes = b""
    first: tuple[str, ...] = ()  # a command that runs before, and is not judged

    @property
    def written(self) -> tuple[str, ...]:
        """The places in which the command may create files."""
        if self.makes is not None:
            return self.makes
        if self.args[:1] == ("export",) and "--to" in self.args:
            return (self.args[self.args.index("--to") + 1],)
        trains = self.args[:1] in (("--config",), ("train",)) and "--dry-run" not in self.args
        return ("runs",) if trains else ()
