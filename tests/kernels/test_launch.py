"""Kernels in a process that does not import Triton."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from rptrain import kernels
from rptrain.kernels import launch


def test_a_kernel_that_was_not_compiled_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "with_triton", False)
    spec = spec_from_file_location("launch_without_triton", launch.__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(RuntimeError, match="the kernel rows_and_columns was not compiled"):
        module.rows_and_columns[(1,)](1, 1, 1, 1)


def test_every_launch_fixes_what_makes_bits(monkeypatch):
    jit = pytest.importorskip("triton.runtime.jit")
    launched = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *given, **options: launched.append((given, options)))
    monkeypatch.setattr(launch.triton, "jit", jit.JITFunction)  # not the interpreter's

    def kernel(x): ...

    launch.jit(kernel)[(1,)](2, num_warps=4)
    assert launched == [((2,), {"grid": (1,), "warmup": False, "num_warps": 4, "enable_fp_fusion": True})]


def test_every_kernel_is_launched_so():
    folder = Path(launch.__file__).parent
    assert not [path.name for path in folder.glob("*.py") if "@triton.jit" in path.read_text()]
