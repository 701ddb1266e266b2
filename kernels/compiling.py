"""Counts the kernels that Triton compiles or loads: the steps in which it does take longer."""

from collections.abc import Callable
from typing import Any

from rptrain.kernels.launch import HAS_TRITON, triton


class Compiled:
    """Counts the kernels that Triton compiles in this process (`count`), and those with the ones that it loads from its
    cache on the disk (`made`).

    `watch` begins; the listener that was there before is called too.
    """

    def __init__(self) -> None:
        self.count = self.made = 0
        self._before: Callable[..., object] | None = None

    def watch(self) -> None:
        if HAS_TRITON and (known := getattr(triton, "knobs", None)) and known.compilation.listener is not self:
            self._before, known.compilation.listener = known.compilation.listener, self

    def __call__(self, *, cache_hit: bool, **more: Any) -> None:
        self.made += 1
        self.count += not cache_hit
        if self._before is not None:
            self._before(cache_hit=cache_hit, **more)


COMPILED = Compiled()
