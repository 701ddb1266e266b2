"""What a model remembers of its sequences: the tokens, and the state of every block's mixer."""

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from rptrain.kernels.batch import IGNORED, MicroBatch, Rotation
from rptrain.kernels.reference.dense import wide
from rptrain.models.layers.block import blocks
from rptrain.models.layers.rope import RotaryTables
from rptrain.models.layers.state import CurrentTokens, State
from rptrain.models.spec import ModelSpec


def cache_bytes(spec: ModelSpec, sequences: int, longest: int, dtype: torch.dtype) -> int:
    """Memory of the states of `sequences` prompts, each of at most `longest` tokens with its answer."""
    return sum(block.mixer.state_bytes(sequences, longest, dtype) for block in blocks(spec))


class Cache:
    """The state of every block's mixer, and the tokens of each sequence.

    `place` names the tokens to compute, a forward pass gives `states` and `current` to every block, and `hold` ends
    it. Whatever happens between them, the cache stays valid: its states are those of `tokens`, and mixers whose
    states cannot be cut back to these start again.
    """

    def __init__(
        self, spec: ModelSpec, sequences: int, dtype: torch.dtype, device: torch.device, limit: int | None = None
    ) -> None:
        """`limit`: tokens that no sequence exceeds, if that is known."""
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.limit = limit
        self.states: list[State] = [block.mixer.new_state(sequences, dtype, device) for block in blocks(spec)]
        self._new: list[list[int]] = []
        self._device = device
        self._rotaries = RotaryTables(spec.rotaries, wide(dtype), device)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def keep(self, sequence: int, tokens: Sequence[int]) -> int:
        """Forgets the tokens of a sequence after the longest prefix that they share with `tokens`.

        Returns the number of tokens that stay, to which every state can be cut back. The last one of `tokens` is never
        kept: its output is needed.
        """
        known = self.tokens[sequence]
        same = 0
        for old, new in zip(known, tokens[:-1], strict=False):
            if old != new:
                break
            same += 1
        while (kept := min(state.keep(sequence, same) for state in self.states)) < same:
            same = kept
        del known[same:]
        return same

    def place(self, new: Sequence[Sequence[int]]) -> Tensor:
        """Makes tokens that follow those of each sequence the current ones; returns them flattened [T].

        They are whole prompts if nothing precedes them, or one token of each sequence; of a single one, any number.
        """
        self._new = [[*tokens] for tokens in new]
        starts, counts = [len(known) for known in self.tokens], [len(tokens) for tokens in self._new]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        fresh, single = not any(starts), all(count == 1 for count in counts)
        assert fresh or single or len(new) == 1
        positions = self._tensor(list(chain.from_iterable(map(range, starts, ends))))
        rotations = self._rotaries.at(positions)
        cu_seqlens = self._tensor([*accumulate(counts, initial=0)]).int()
        self.current = CurrentTokens(
            positions=positions,
            sequence=torch.arange(len(new), device=self._device).repeat_interleave(self._tensor(counts)),
            cu_seqlens=cu_seqlens,
            ends=ends,
            rotations=rotations,
            prompts=self._packed(positions, cu_seqlens, max(counts), rotations) if fresh else None,
            single=single,
            limit=self.limit,
        )
        return self._tensor(list(chain.from_iterable(self._new)))

    def _packed(
        self, positions: Tensor, cu_seqlens: Tensor, longest: int, rotations: tuple[Rotation, ...]
    ) -> MicroBatch:
        """Whole prompts as the documents of one sequence."""
        return MicroBatch(
            sequences=1,
            length=len(positions),
            positions=positions,
            labels=torch.full_like(positions, IGNORED),
            cu_seqlens=cu_seqlens,
            max_seqlen=longest,
            uniform=False,  # there are many lengths, and each would need its own preparation
            rotations=rotations,
        )

    def hold(self) -> None:
        """The forward pass over the current tokens is complete."""
        for known, new in zip(self.tokens, self._new, strict=True):
            known += new

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)
