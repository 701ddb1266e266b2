"""The bytes that processes exchange in a step, for plans. Each is what the busiest process sends, and at most receives.

Parts of small units are whole chunks of the optimizer; here they are taken to be equal.
"""

import torch

from rptrain.engine.memory.share import Share
from rptrain.engine.memory.step_layout import ReduceDtype, accumulate_dtype
from rptrain.engine.optim.embedding_grads import row_stride
from rptrain.engine.tree import subtrees
from rptrain.models.params import Unit
from rptrain.models.spec import ModelShape


class Traffic:
    """The traffic of a run whose weights are of `dtype`, and whose gradients are sent in `reduce_dtype`."""

    def __init__(self, share: Share, dtype: torch.dtype, reduce_dtype: ReduceDtype) -> None:
        self._share, self._dtype, self._wide = share, dtype, accumulate_dtype(dtype)
        self._sent = torch.bfloat16.itemsize if reduce_dtype == "bfloat16" else self._wide.itemsize
        everyone = (share.of(rank) for rank in range(share.world))
        self._trees = [subtrees(one.groups, share.replicas) for one in everyone]

    @property
    def _others(self) -> float:
        """The fraction of a unit that other processes update."""
        return 1 - 1 / self._share.world

    def gradients(self, unit: Unit) -> float:
        """Partial sums of a unit's gradient: one for each subtree of a process's groups."""
        return max(map(len, self._trees)) * unit.numel * self._sent * self._others

    def rows(self, spec: ModelShape, tokens: int) -> float:
        """Rows of the embedding's gradient, if all `tokens` tokens of a group in a step are different."""
        if not spec.units[0].trainable:
            return 0.0
        rows = max(sum(min(len(tree) * tokens, spec.vocab_size) for tree in trees) for trees in self._trees)
        return rows * row_stride(spec.hidden_size, self._wide) * self._sent * self._others

    def weights(self, unit: Unit) -> float:
        """A unit's updated weights."""
        return unit.numel * unit.dtype_in(self._dtype).itemsize * self._others
