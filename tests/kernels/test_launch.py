"""Kernels in a process that does not import Triton."""

from importlib.util import module_from_spec, spec_from_file_location

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
