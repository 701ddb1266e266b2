import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_torch_thread():
    """As the engine sets it: the threads of a pool are the only ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, Path]]:
    """Libraries of a C file by instruction set: the clones that target_clones makes, compiled one at a time."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    known = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    kinds = [("x86-64", "sse2"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512bw")]
    available = [name for name, flag in kinds if flag in known]
    if len(available) < 2:
        pytest.skip("one instruction set only")
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-DCLONES="]

    @cache
    def build(source: Path) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp(source.stem)
        for name in available:
            subprocess.run(["gcc", *flags, f"-march={name}", "-o", folder / f"{name}.so", source, "-lm"], check=True)
        return {name: folder / f"{name}.so" for name in available}

    return build
