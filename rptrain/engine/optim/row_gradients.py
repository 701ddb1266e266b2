"""The accumulation of the embedding's gradient rows on the host.

Devices need neither a float32 gradient slot for the table, nor atomics. Gradient rows are summed in token order, so the
sums do not depend on the number of devices.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rptrain.engine.memory.arena import Arena
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.memory.unit_state import UnitState
from rptrain.engine.optim.embedding_grads import CpuRows, row_stride
from rptrain.engine.tree import additions
from rptrain.models.spec import ModelShape, ModelSpec


class RowGradients:
    """Gradient rows of the embedding table, summed over an iteration's micro-batches and applied once.

    A row's gradient is the sum over its tokens: within each group of replicas in order, over the group's micro-batches
    in the order of `begin`, and then over the groups in which the row occurs, as a balanced binary tree over all
    groups; in the accumulation dtype. One buffer, allocated once, has a row for each token id that the tokens of each
    group in a step can contain; rows whose sums are complete sooner come first in each group. No gradient is added to
    `spec.padding_row`.
    """

    def __init__(self, state: UnitState, spec: ModelSpec, layout: StepLayout, cpu: CpuRows) -> None:
        """`state`: that of the embedding."""
        replicas = layout.replicas if layout.share is None else layout.share.replicas
        self._tied, self._replicas, self._own = spec.tied, replicas, self._groups(replicas)
        self._padding_row, self._cpu = spec.padding_row, cpu
        self._table = state.unit.views(state.grad)["embed"]
        if not spec.tied:
            self._cpu.zero(self._table)  # an earlier engine may have left rows there
        vocab_size, hidden_size = self._table.shape
        tokens, wide = layout.group_tokens, layout.wide
        shape = len(self._own) * min(tokens, vocab_size) + self._others(tokens), row_stride(hidden_size, wide)
        self._buffer = Arena(math.prod(shape) * wide.itemsize).take(math.prod(shape), wide).view(shape)
        self._rows = torch.empty(0, dtype=torch.int64)  # rows of the table that occur, ordered by their last occurrence
        self._places = self._rows  # [M, T], index of each token's sum in the buffer
        self._sources = self._rows.view(replicas, 0)  # [R, rows], index of each group's sum of each row; -1: none
        self._sums = self._buffer[:0]
        self._ends: deque[int] = deque()  # complete rows after each micro-batch that is still to come
        self._whole = self._applied = 0  # rows

    @staticmethod
    def nbytes(spec: ModelShape, layout: StepLayout) -> int:
        """Upper bound of the memory: a row per distinct token of each group, and indices."""
        wide, replicas, tokens = layout.wide, layout.replicas, layout.group_tokens
        rows = replicas * min(tokens, spec.vocab_size)
        tokens, distinct = replicas * tokens, min(replicas * tokens, spec.vocab_size)
        sums = rows * row_stride(spec.hidden_size, wide) * wide.itemsize
        return sums + ((1 + replicas) * distinct + tokens) * torch.int64.itemsize

    def begin(self, input_ids: Tensor, order: Iterable[int], groups: Sequence[int]) -> None:
        """Starts an iteration with tokens [M, T], whose micro-batches will be added in `order`; micro-batch m belongs
        to groups[m].

        The gradient of the previous iteration must no longer be in use.
        """
        if not self._tied:
            self._cpu.clear(self._table, self._rows)
        rows, found = torch.unique(input_ids, return_inverse=True)
        last = torch.zeros_like(rows)
        for turn, m in enumerate(order):
            last[found[m]] = turn
        by_end = last.argsort(stable=True)
        self._rows, found = rows[by_end], by_end.argsort()[found]
        self._occur(found, groups)
        self._ends = deque(last.bincount(minlength=len(found)).cumsum(0).tolist())
        self._whole = self._applied = used = 0
        self._places, self._sources = torch.empty_like(found), torch.full((self._replicas, len(rows)), -1)
        of_group = torch.tensor(groups)
        for group in self._own:
            own, sources = found[of_group == group], self._sources[group]
            occurs = torch.zeros(len(rows), dtype=torch.bool)
            occurs[own] = True
            count = int(occurs.sum())
            sources[occurs] = torch.arange(used, used + count)
            self._places[of_group == group] = sources[own]
            used += count
        self._sums = self._buffer[:used]
        self._cpu.zero(self._sums)

    def add(self, micro_batch: int, gradient: Tensor) -> None:
        """Adds the gradient [T, D] of the next micro-batch's embeddings."""
        self._cpu.add(self._sums, self._places[micro_batch], gradient)
        self._whole = self._ends.popleft()

    def apply(self) -> None:
        """Adds the complete sums to the unit's gradient: to the head's if tied, otherwise to rows of zeros."""
        new = slice(self._applied, self._whole)
        self._merge(additions(self._replicas), new)
        self._add_totals(new)
        self._applied = self._whole

    def _add_totals(self, places: slice | Tensor) -> None:
        """Adds the totals of the rows at these places in `_rows` to the table, except that of the padding row."""
        rows, sources = self._rows[places], self._sources[0, places]
        if self._padding_row is not None:
            trained = rows != self._padding_row
            rows, sources = rows[trained], sources[trained]
        self._cpu.apply(self._sums, sources, rows, self._table)

    def _occur(self, found: Tensor, groups: Sequence[int]) -> None:
        """Notes in which groups rows occur: `found` [M, T] has the position of each token's row."""

    def _groups(self, replicas: int) -> range:
        """The groups whose micro-batches are added here."""
        return range(replicas)

    def _others(self, tokens: int) -> int:
        """The most rows of other groups in the buffer."""
        return 0

    def _merge(self, pairs: Iterable[tuple[int, int]], rows: slice | Tensor) -> None:
        """Adds groups' sums of some rows; those of a group then contain what was added to them."""
        for to, source in pairs:
            totals, others = self._sources[to, rows], self._sources[source, rows]
            both = (totals >= 0) & (others >= 0)
            self._cpu.merge(self._sums, totals[both], others[both])
            self._sources[to, rows] = totals.where(totals >= 0, others)

    def close(self) -> None:
        """Frees the buffer; an engine may be kept for longer than it is used."""
        self._buffer = self._sums = torch.empty(0)
