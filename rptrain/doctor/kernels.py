"""Compiles a kernel for each GPU, in a process of its own.

python -P -m rptrain.doctor.kernels: prints a JSON line for each GPU, the check as `Check.to_dict` gives it. In another
process everything is compiled anew, its compilers print what they like, and LLVM may end it.
"""

import json
import subprocess
import sys

import torch

from rptrain.doctor.checks import Check, check
from rptrain.doctor.failures import attempt
from rptrain.kernels.launch import HAS_TRITON, triton
from rptrain.kernels.toolchain import try_out
from rptrain.kernels.toolchain_errors import reinstall

COMMAND = (sys.executable, "-P", "-m", "rptrain.doctor.kernels")
LONGEST = 300.0  # seconds: a compiler may wait for a network file system


def examine() -> list[Check]:
    """One check per GPU. `runs` in its figures says whether kernels ran on it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return []
    try:
        ended = subprocess.run(COMMAND, capture_output=True, text=True, timeout=LONGEST, stdin=subprocess.DEVNULL)
        printed, said = ended.stdout, ended.stderr.strip().splitlines()
        how = f"the process that compiled it ended with status {ended.returncode}: {said[-1] if said else 'no message'}"
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode()
        how = f"it was not compiled within {LONGEST:.0f} s"
    found = [Check(**json.loads(line)) for line in printed.splitlines() if line.startswith("{")]
    return found + [check(_subject(index), how, reinstall()) for index in range(len(found), count)]


def runs(found: Check) -> bool:
    """Whether kernels run on the GPU of this check."""
    return "runs" in found.figures


def main() -> None:
    for index in range(torch.cuda.device_count()):
        print(json.dumps(attempt(_subject(index), _try_out, index).to_dict()), flush=True)


def _try_out(index: int) -> Check:
    try_out(torch.device("cuda", index), anew=True)
    if HAS_TRITON:
        return check(_subject(index), f"Triton {triton.__version__} compiled one, and it ran", runs=True)
    return check(_subject(index), "those of torch run", runs=True)


def _subject(index: int) -> str:
    return f"cuda:{index} kernels"


if __name__ == "__main__":
    main()
