"""The delta net's state while decoding: the convolution's last inputs, and the matrices of the delta rule."""

from collections.abc import Sequence

from torch import Tensor


class DeltaState:
    """What a delta net remembers of B sequences. It stays whole, or is lost."""

    def __init__(self, history: Tensor, matrices: Tensor) -> None:
        self.history = history  # [B, channels, width - 1], the last inputs of the convolution
        self.matrices = matrices  # [B, H, C, V], wide
        self._tokens = [0] * len(history)

    @property
    def nbytes(self) -> int:
        return self.history.nbytes + self.matrices.nbytes

    def keep(self, sequence: int, tokens: int) -> int:
        if tokens != self._tokens[sequence]:
            self.history[sequence] = 0
            self.matrices[sequence] = 0
            self._tokens[sequence] = 0
        return self._tokens[sequence]

    def replace(self, history: Tensor, matrices: Tensor, ends: Sequence[int]) -> None:
        """Remembers sequences of `ends` tokens. If this is interrupted, the number tells that they were not held."""
        self._tokens = [*ends]
        self.history, self.matrices = history, matrices
