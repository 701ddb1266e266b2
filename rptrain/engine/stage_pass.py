"""The computation of one micro-batch in one stage: forward, or recomputed forward, loss and backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rptrain.engine.recorder import LayerTimer
from rptrain.kernels.batch import MicroBatch
from rptrain.models.params import Grads, Params
from rptrain.models.spec import ModelSpec
from rptrain.schedule.plan import Stage

PIECE_STEPS = 8  # of a pass that are issued together


@dataclass(frozen=True)
class StageWeights:
    """The parameters and gradient accumulators of a stage, by layer."""

    params: Sequence[Params]
    sums: Sequence[Grads]


@dataclass(frozen=True)
class StageTensors:
    """What a stage reads and writes of a micro-batch: its input, the gradient of its output, outputs by boundary."""

    x: Tensor
    dy: Tensor | None
    outputs: Mapping[int, Tensor]


class StagePass:
    """Computes a stage in the compute stream: call `run` with each of `pieces`, in order.

    A step is a pass over one layer. The first steps go forward through the stage's layers, in order; step i is the
    first to read the parameters of the i-th layer. In a backward stage, the other steps go back through the layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        describe: Callable[[], MicroBatch],
        weights: StageWeights,
        tensors: StageTensors,
        timed: LayerTimer | None,
    ) -> None:
        """`describe` is called inside the stream; `timed` measures each pass over a layer."""
        self._spec, self._stage, self._describe = spec, stage, describe
        self._timed = timed or (lambda kind, layer: nullcontext())
        self._params, self._sums, self._outputs = weights.params, weights.sums, tensors.outputs
        self._h, self._dy = tensors.x, tensors.dy
        self._saved: list[Any] = []

    def pieces(self, *, by_layer: bool = False) -> list[range]:
        """The steps in pieces of about the same length; `by_layer`: those that go forward one at a time."""
        forward = len(self._stage.layers) if by_layer else 0
        return [range(i, i + 1) for i in range(forward)] + _split(range(forward, self._steps))

    def run(self, steps: range, scale: float, loss: Tensor) -> None:
        """Runs steps. The loss is multiplied by `scale` for its gradients; a fused stage writes it to `loss`."""
        for i in steps:
            self._step(i, scale, loss)

    @property
    def _steps(self) -> int:
        """The number of steps. The head goes forward and back in one."""
        count = len(self._stage.layers)
        return {"F": count, "FB": 2 * count - 1, "B": 2 * count}[self._stage.kind]

    def _step(self, i: int, scale: float, loss: Tensor) -> None:
        stage = self._stage
        if i == 0:
            self._mb = self._describe()
        last = i == len(stage.layers) - 1
        if i >= len(stage.layers):
            self._backward(self._steps - 1 - i)
        elif not stage.backward:
            self._forward(i)
        elif stage.kind == "FB" and last:
            self._head(scale, loss)
        else:
            self._recompute(i, last)
        if stage.backward and last:
            del self._h  # frees memory that is not read again
        if stage.backward and i == self._steps - 1:
            assert self._dy is not None
            self._outputs[stage.start].copy_(self._dy)
            del self._dy

    def _forward(self, i: int) -> None:
        index = self._stage.start + i
        with self._timed("forward", index):
            self._h = self._spec.layers[index].forward(self._params[i], self._h, self._mb)
        if index + 1 in self._outputs:
            self._outputs[index + 1].copy_(self._h)

    def _recompute(self, i: int, last: bool) -> None:
        index = self._stage.start + i
        layer = self._spec.layers[index]
        if last:  # a later stage has already used its output
            self._saved.append(layer.recompute(self._params[i], self._h, self._mb))
            return
        with self._timed("forward", index):
            self._h, kept = layer.forward_saved(self._params[i], self._h, self._mb)
        self._saved.append(kept)

    def _head(self, scale: float, loss: Tensor) -> None:
        with self._timed("backward", self._stage.stop - 1):
            total, self._dy = self._spec.head.loss_backward(self._params[-1], self._sums[-1], self._h, self._mb, scale)
        loss.copy_(total)

    def _backward(self, i: int) -> None:
        index = self._stage.start + i
        dy, saved = self._dy, self._saved
        assert dy is not None
        with self._timed("backward", index):
            self._dy = self._spec.layers[index].backward(self._params[i], self._sums[i], saved.pop(), dy, self._mb)


def _split(steps: range) -> list[range]:
    count = -(-len(steps) // PIECE_STEPS)
    return [steps[len(steps) * k // count : len(steps) * (k + 1) // count] for k in range(count)]
