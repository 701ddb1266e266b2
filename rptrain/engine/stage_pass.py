"""The computation of one micro-batch in one stage: forward, or recomputed forward, loss and backward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from rptrain.engine.recorder import LayerTimer
from rptrain.kernels.batch import MicroBatch
from rptrain.models.spec import Grads, ModelSpec, Params
from rptrain.schedule.plan import Stage


class StagePass:
    """Computes a stage in the compute stream: call `step(i)` once for each layer of the stage, in order.

    Step i is the first to read the parameters of the stage's i-th layer. The last step of a backward stage computes
    the backward pass of all layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        describe: Callable[[], MicroBatch],
        params: Sequence[Params],
        sums: Sequence[Grads],
        x: Tensor,
        dy: Tensor | None,
        outputs: Mapping[int, Tensor],
        timed: LayerTimer | None,
    ) -> None:
        """`params` and `sums` (gradient accumulators) are listed by layer of the stage, `outputs` by boundary.

        `describe` is called inside the stream; `timed` measures each pass over a layer.
        """
        self._spec, self._stage, self._describe = spec, stage, describe
        self._timed = timed or (lambda kind, layer: nullcontext())
        self._params, self._sums, self._outputs = params, sums, outputs
        self._h, self._dy = x, dy
        self._saved: list[Any] = []

    def run(self, scale: float, loss: Tensor) -> None:
        """Runs all steps."""
        for i in range(len(self._stage.layers)):
            self.step(i, scale, loss)

    def step(self, i: int, scale: float, loss: Tensor) -> None:
        """Runs one step. The loss is multiplied by `scale` for its gradients; a fused stage writes it to `loss`."""
        stage = self._stage
        if i == 0:
            self._mb = self._describe()
        last = i == len(stage.layers) - 1
        if not stage.backward:
            self._forward(i)
        elif stage.kind == "FB" and last:
            self._head(scale, loss)
        else:
            self._recompute(i, last)
        if stage.backward and last:
            self._backward()

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

    def _backward(self) -> None:
        dy = self._dy
        assert dy is not None
        del self._h, self._dy  # frees memory that is not read again
        for i in reversed(range(len(self._saved))):
            index = self._stage.start + i
            with self._timed("backward", index):
                dy = self._spec.layers[index].backward(self._params[i], self._sums[i], self._saved.pop(), dy, self._mb)
        self._outputs[self._stage.start].copy_(dy)
