"""Keeps the repository root off sys.path: its `kernels` and `models` folders must not be importable by those names."""

import atexit
import gc
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import benchmarks  # noqa: E402, F401 - its programs are tested too; they are found in the package from now on

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# torch computes with one thread, in child processes too: results must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RPTRAIN_PHASE_PERIOD"] = "0"  # a slow machine adds no lines to the output of commands

import torch  # noqa: E402 - the path and the number of threads come first

from tests.ids import pytest_make_parametrize_id  # noqa: E402, F401 - a hook
from tests.sampling import pytest_collection_modifyitems  # noqa: E402, F401 - a hook

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported; kernels are tested on the CPU then


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Searches for no cycles while modules and test items are made, which stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Takes modules and test items out of searches for cycles, each of which would visit half a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # the end of the interpreter finds them: triton reports leaks otherwise


@pytest.fixture(autouse=True, scope="session")
def tokens_are_kept_apart(tmp_path_factory):
    """No test takes what an earlier session has tokenized or hashed, nor leaves anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tokens")
        patch.setattr("rptrain.data.cache.default_folder", lambda: folder)
        patch.setattr("rptrain.utils.file_digests.folder", lambda: folder / "digests")
        yield


@pytest.fixture(scope="session")
def trainers():
    """Trains in child processes: see `Trainers` in run_tools.py."""
    from tests.run_tools import Trainers

    with Trainers() as server:
        yield server
