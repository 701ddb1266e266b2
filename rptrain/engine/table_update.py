"""The embedding table's update in pieces: the rows that the next forward reads first, the rest behind all other units.

Without it no forward could begin before the largest unit was updated. AdamW works element by element, so the order
changes no bit.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from rptrain.engine.adam import PIECE


class TableUpdate:
    """One step's update of a table with rows of `width` elements, the first of the unit's `numel`. Thread-safe.

    `update` is called with the numbers of pieces, each of them once and at times none; or with None for all at once,
    where `pieces` is False.
    """

    def __init__(self, width: int, numel: int, update: Callable[[Tensor | None], None], *, pieces: bool = True) -> None:
        self._width, self._update = width, update
        self._pending = torch.ones(-(-numel // PIECE), dtype=torch.bool) if pieces else None
        self._over = False
        self._lock = threading.Lock()

    def rows(self, ids: Tensor) -> None:
        """Returns once the rows `ids` are updated."""
        if self._over:
            return
        first, last = ids * self._width // PIECE, (ids * self._width + self._width - 1) // PIECE
        spanned = torch.arange(-(-self._width // PIECE) + 1)
        wanted = torch.minimum(first[:, None] + spanned, last[:, None])
        with self._lock:
            if self._over:
                return
            if self._pending is None:
                self._finish(None)
                return
            asked = torch.zeros_like(self._pending)
            asked[wanted] = True
            asked &= self._pending
            self._pending &= ~asked
            self._update(asked.nonzero().flatten())

    def rest(self) -> None:
        """Returns once all is updated."""
        with self._lock:
            if not self._over:
                self._finish(None if self._pending is None else self._pending.nonzero().flatten())

    def _finish(self, pieces: Tensor | None) -> None:
        self._update(pieces)
        self._over = True
