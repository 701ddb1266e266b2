"""Starting a trainer that outlives the interface: a process of a session of its own, which writes to a log file."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rptrain.errors import UserError

COMMAND = (sys.executable, "-P", "-m", "rptrain", "train")  # -P: without the folder one is in on the path
LOG = "trainer.log"  # in a run's folder: all that the trainer and its libraries print


@dataclass
class Launched:
    """A trainer on its way. Its folder may not be there yet: it is made once the config and the data were checked."""

    process: "subprocess.Popen[bytes]"
    path: Path
    log: Path

    def settle(self) -> bool:
        """Whether the run's folder is there; the log is moved into it, where the trainer goes on writing to it."""
        if not (self.path / "config.toml").is_file():
            return False
        inside = self.path / LOG
        if self.log != inside:
            self.log.rename(inside)
            self.log = inside
        return True

    def said(self, most: int = 4000) -> str:
        """The end of what it printed."""
        try:
            return self.log.read_bytes()[-most:].decode(errors="replace").strip()
        except OSError:
            return ""


def start(config: Path, output_dir: str, run_name: str, environment: Mapping[str, str]) -> Launched:
    """Begins a new run of a config, in a folder with a free name. UserError where there can be none."""
    parent = Path(output_dir).expanduser()
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"no run can be made in {parent}: {error.strerror}") from None
    name, number = run_name, 1
    while (parent / name).exists() or (parent / f"{name}.log").exists():
        number += 1
        name = f"{run_name}-{number}"
    overrides = ["save.resume=never", f"log.run_name={json.dumps(name)}"]
    path, log = parent / name, parent / f"{name}.log"
    return Launched(_begin(config, overrides, log, environment), path, log)


def resume(run: Path, environment: Mapping[str, str]) -> Launched:
    """Goes on with a run from its last checkpoint."""
    log = run / LOG
    overrides = [f"save.resume={json.dumps(str(run))}"]
    return Launched(_begin(run / "config.toml", overrides, log, environment), run, log)


def _begin(config: Path, overrides: list[str], log: Path, environment: Mapping[str, str]) -> Any:
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*COMMAND, "--config", str(config), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **environment},
            )
    except OSError as error:
        raise UserError(f"{log} cannot be written: {error.strerror}") from None
