"""Run the programs that write GGUF files, in child processes that are ended with this one."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rptrain.gguf.tools import INSTALL
from rptrain.utils.errors import UserError
from rptrain.utils.phases import Phase, during

# Starts a program that the kernel ends (SIGKILL) if this process is killed: prctl(PR_SET_PDEATHSIG) outlives exec.
STARTED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
SHOWN = 12  # lines of its output that an error has if their meaning is not known
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # a converter must not look for files that are missing
UNKNOWN_TOKENIZER = (
    "the converter recognizes a tokenizer by how it splits a test text, and does not know this one. It knows those of "
    "published models (Llama, Qwen, Mistral, Granite, Phi, GLM, SmolLM, ...). A tokenizer that was trained for a model "
    "of your own has to be added to llama.cpp (convert_hf_to_gguf_update.py); that of tiny-tasks, which has no merges, "
    "cannot be loaded by it"
)
# What the output of a program means, by what is found in it.
MEANINGS = {
    r"BPE pre-tokenizer was not recognized": UNKNOWN_TOKENIZER,
    r"Model \S+ is not supported|unknown (model )?architecture": (
        "this version of llama.cpp does not know the model: update it (git pull)"
    ),
    r"ModuleNotFoundError: No module named|is not installed": f"a package is missing: {INSTALL}",
    r"No space left on device": "the disk is full: free disk space",
}


def run(command: Sequence[str | Path], made: Path, name: str, advice: str = "") -> None:
    """Runs a program that writes the file `made`, whose folder is also its current directory, and waits for its end.

    Paths may be relative to the current directory of this process. UserError with the end of its output if it fails, or
    if the file is not there. `advice` says what else to do then.
    """
    made, command = made.absolute(), [part.absolute() if isinstance(part, Path) else part for part in command]
    log = made.with_suffix(".log")
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", STARTED, *(str(part) for part in command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=made.parent,
            env=os.environ | OFFLINE,
            process_group=0,  # Ctrl-C in a terminal is for this process, which ends the other one
        )
        shown = Phase(name)
        shown.update = lambda: setattr(shown, "done", made.stat().st_size if made.exists() else 0)
        try:
            with during(shown):
                status = child.wait()
        finally:
            child.kill()
            child.wait()
    if status == 0 and made.is_file():
        log.unlink()
        return
    said = log.read_text(errors="replace").strip()
    how = f"ended with status {status}" if status else "wrote no file"
    meaning = next((text for pattern, text in MEANINGS.items() if re.search(pattern, said)), "")
    todo = "; ".join(filter(None, (meaning, advice)))
    lines = "\n".join(said.splitlines()[-1 if meaning else -SHOWN :])
    raise UserError(f"{Path(_program(command)).name} {how}{f': {todo}' if todo else ''}. It said:\n{lines}")


def python(script: Path, *arguments: str | Path) -> list[str | Path]:
    """The command for a Python script of another project, which imports modules beside it."""
    return [sys.executable, script, *arguments]


def module(name: str, *arguments: str | Path) -> list[str | Path]:
    """The command for a module of this project."""
    return [sys.executable, "-P", "-m", name, *arguments]


def _program(command: Sequence[str | Path]) -> str:
    """The script or module that a command runs, or its program."""
    words = [str(part) for part in command]
    return words[0] if words[0] != sys.executable else words[3] if words[1] == "-P" else words[1]
