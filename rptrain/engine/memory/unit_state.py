"""The flat parameter, gradient and optimizer buffers of a unit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rptrain.engine.memory import wire
from rptrain.kernels.quant import Quantized
from rptrain.models.params import Unit
from rptrain.models.weights.file_backed import FileBackedUnit


@dataclass
class UnitState:
    """The flat buffers of a unit, each of `unit.numel` elements, except scales of blocks in `moments`.

    If several processes train the model, this one updates the elements in `own`. Moments, remainder and masters are of
    these only.

    A frozen unit has only parameters, in one generation, and no `grads`. There is a gradient for each group of replicas
    that computes one; `grad`, the first, becomes their sum. The parameters of a quantized unit are bytes, as
    `unit.stored_views` describes; `views` has the parameters that are not in `quantized`. A `file_backed` unit stays in
    its files, and its `params` is empty.

    There are two generations in async (one is read by the devices while the optimizer writes the other) and one in
    sync. `current` is the index of W_T, `before` the index of W_{T-1}; they are equal after a skipped step. Generations
    are those of `params`, except in a unit that is `wired` (models/params.py): devices read its `wire`, whose
    generations they are then, and `params` has W_T alone, updated in place. W_{T-1} is left in the wire format only.

    A bfloat16 parameter and `remainder` hold a float32 master weight exactly: its bits, plus 0x8000, shifted right by
    16, are the parameter; its low 16 bits are the remainder. A float16 parameter is the rounded copy of a float32
    master weight in `masters`. For float32 and float64 the parameter is the master, and both are None.
    """

    unit: Unit
    params: list[Tensor]
    grads: list[Tensor]
    moments: dict[str, Tensor]  # exp_avg, exp_avg_sq and their scales; see moments.layout
    remainder: Tensor | None
    current: int = 0
    masters: Tensor | None = None
    before: int = field(init=False)
    views: list[dict[str, Tensor]] = field(default_factory=list)  # parameters by name, for each generation
    quantized: dict[str, Quantized] = field(default_factory=dict)
    file_backed: FileBackedUnit | None = None
    wire: list[Tensor] = field(default_factory=list)  # in bytes; see engine/memory/wire.py
    own: slice = None  # type: ignore[assignment]  # all elements

    def __post_init__(self) -> None:
        if self.own is None:
            self.own = slice(0, self.unit.numel)
        self.views = self.views or [self.unit.views(flat) for flat in self.params]
        self.before = self.spare if self.params else self.current  # W_{-1}, equal to W_0

    @property
    def grad(self) -> Tensor:
        """The gradient that the optimizer reads."""
        return self.grads[0]

    @property
    def spare(self) -> int:
        """The generation that the next step writes; no device reads it by then."""
        return (self.current + 1) % self.generations

    @property
    def generations(self) -> int:
        return len(self.wire or self.params)

    @property
    def newest(self) -> int:
        """The place of W_T in `params`."""
        return 0 if self.wire else self.current

    @property
    def written(self) -> int:
        """The place in `params` of what the next step writes: `newest` if the unit is updated in place."""
        return 0 if self.wire else self.spare

    def uploaded(self, generation: int) -> Tensor:
        """The bytes of a generation that devices read."""
        return self.wire[generation] if self.wire else self.params[generation].view(torch.uint8)

    def wire_writes(self, generation: int) -> Sequence[Callable[[], object]]:
        """Calls that together write the weights in `params` to a generation of the wire; none without a wire."""
        return wire.writes(self.unit, self.params[0], self.wire[generation]) if self.wire else ()

    def own_part(self, flat: Tensor, part: slice) -> Tensor:
        """A range of elements from a buffer that has `own`, or a value for each block of these."""
        shared = (self.own.stop - self.own.start) // len(flat)
        return flat[(part.start - self.own.start) // shared : (part.stop - self.own.start) // shared]

    def flip(self) -> None:
        """Makes the spare generation, which was written, W_T."""
        self.before, self.current = self.current, self.spare
