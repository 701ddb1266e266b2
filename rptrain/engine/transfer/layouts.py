"""The offsets of a stage's parameters and gradients in a device's buffers, and their views by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rptrain.kernels import fp8
from rptrain.kernels.linear import Weight
from rptrain.kernels.quant import Quantized
from rptrain.kernels.requantize import requantize
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.schedule.plan import Stage


def stage_units(spec: ModelShape, stage: Stage) -> tuple[int, ...]:
    """The stage's parameter units, in order."""
    return tuple(unit for layer in spec.stack[stage.start : stage.stop] for unit in layer.units)


class UnitOffsets:
    """The offsets of units in a buffer, one after the other."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: the units in order, each with its size."""
        self.sizes = sizes
        self.units = tuple(unit for unit, _ in sizes)
        self.offsets: dict[int, int] = {}
        self.size = 0
        for unit, size in sizes:
            self.offsets[unit] = self.size
            self.size += size

    def of(self, unit: int, buffer: Tensor) -> Tensor:
        """The unit's part of the buffer."""
        return buffer[self.offsets[unit] :][: dict(self.sizes)[unit]]


@dataclass(frozen=True)
class Bound:
    """A layer's parameters on a device as the layer reads them, and those that are prepared: where from, where to."""

    params: dict[str, Weight]
    quantized: list[tuple[Quantized, Tensor]]
    in_fp8: list[tuple[Tensor | Quantized, fp8.FP8Weight]]
    dtype: torch.dtype  # of the model
    uploaded: list[fp8.FP8Weight]  # whose codes arrived, and of which a backward stage transposes a copy

    @property
    def prepared(self) -> bool:
        """Whether `prepare` does anything."""
        return bool(self.quantized or self.in_fp8 or self.uploaded)

    def prepare(self) -> None:
        """Dequantizes, quantizes to FP8, and transposes codes that were uploaded.

        Runs in the compute stream, after the layer's units have arrived.
        """
        for source, place in self.quantized:
            source.dequantize(place)
        for source, weight in self.in_fp8:
            if isinstance(source, Quantized):
                requantize(source, weight, self.dtype)
            else:
                weight.write(source)
        for weight in self.uploaded:
            weight.write_columns()


class ParamLayout(UnitOffsets):
    """The offsets of a stage's units in a device's parameter slot, in bytes."""

    def __init__(self, spec: ModelSpec, stage: Stage, dtype: torch.dtype) -> None:
        units = stage_units(spec, stage)
        super().__init__([(unit, spec.units[unit].wire_bytes(dtype.itemsize)) for unit in units])
        self._spec, self._stage, self._dtype = spec, stage, dtype
        self._prepared = UnitOffsets(
            [(unit, spec.units[unit].prepared_bytes(dtype.itemsize, backward=stage.backward)) for unit in units]
        )

    def bind(self, slot: Tensor, prepared: Tensor) -> list[Bound]:
        """For each layer of the stage, its parameters as views of a slot and of the buffer of prepared weights."""
        bound = []
        for layer in self._spec.stack[self._stage.start : self._stage.stop]:
            params, narrow = dict[str, Weight](), list[tuple[Quantized, Tensor]]()
            in_fp8: list[tuple[Tensor | Quantized, fp8.FP8Weight]] = []
            uploaded: list[fp8.FP8Weight] = []
            for index in layer.units:
                unit, buffer = self._spec.units[index], self._prepared.of(index, prepared)
                if unit.wired:
                    plain, weights = unit.wire_views(self.of(index, slot), self._dtype)
                    quantized = {}
                else:
                    plain, quantized = unit.stored_views(self.of(index, slot), self._dtype)
                    weights = {param.name: param.fp8_of(quantized[param.name]) for param in unit.codes_uploaded}
                wide = unit.dequantized_bytes(self._dtype.itemsize)
                columns = unit.columns_views(buffer[wide:], backward=self._stage.backward)
                weights |= {name: weights[name]._replace(columns=place) for name, place in columns.items()}
                uploaded += [weights[name] for name in columns]
                places = unit.places(buffer[:wide].view(self._dtype))
                stored = plain | {param.name: param.dequantized_view(places[param.name]) for param in unit.dequantized}
                narrow += [(quantized[name], place) for name, place in places.items()]
                sources = plain | quantized
                fp8_views = unit.fp8_views(buffer[wide:], backward=self._stage.backward)
                in_fp8 += [(sources[name], weight) for name, weight in fp8_views.items()]
                params |= stored | weights | fp8_views
            bound.append(Bound(params, narrow, in_fp8, self._dtype, uploaded))
        return bound


class GradLayout(UnitOffsets):
    """The offsets of a stage's trainable units among its gradient accumulators, in elements."""

    def __init__(self, spec: ModelSpec, stage: Stage) -> None:
        super().__init__([(unit, spec.units[unit].numel) for unit in spec.trained(stage_units(spec, stage))])
        self._spec, self._stage = spec, stage

    def bind(self, sums: Tensor) -> list[dict[str, Tensor]]:
        """For each layer of the stage, its gradients as views of the accumulators."""
        return [
            {
                name: view
                for unit in layer.units
                if unit in self.offsets
                for name, view in self._spec.units[unit].views(self.of(unit, sums)).items()
            }
            for layer in self._spec.stack[self._stage.start : self._stage.stop]
        ]
