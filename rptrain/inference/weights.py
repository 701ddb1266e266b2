"""The weights of a model where it answers: on a device, or streamed to it block by block from host memory."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from rptrain.engine.memory.arena import Arena, aligned
from rptrain.engine.memory.page_locking import Locking
from rptrain.inference.model import Model
from rptrain.inference.placement import SLOTS, Placement
from rptrain.kernels.quant import Quantized
from rptrain.kernels.toolchain import try_out
from rptrain.models.decode.generate import Weights
from rptrain.models.params import Unit
from rptrain.utils.page_locks import locked_sentence, locking_advice
from rptrain.utils.phases import phase

UnitTensors = tuple[Mapping[str, Tensor], Mapping[str, Quantized]]  # of a unit: plain ones, and quantized ones


def placed(model: Model, placement: Placement, tell: Callable[[str], object]) -> Weights:
    """Loads a model. A quantized one stays so on the GPU, and is dequantized once for the CPU.

    `tell` is called with a sentence if host memory for the GPU cannot be page-locked. Raises ToolchainError, before
    anything is loaded, if kernels cannot be compiled or run on the GPU.
    """
    if placement.kind == "cpu":
        return dense(model, placement.device)
    try_out(placement.device)
    if placement.kind == "gpu":
        return Resident(model, placement.device)
    streamed = Streamed(model, placement.device)
    if streamed.locking.missing:
        tell(locked_sentence(streamed.locking.locked, streamed.locking.copied, locking_advice()))
    return streamed


def dense(model: Model, device: torch.device) -> Weights:
    """All weights on a device, dequantized."""
    units = []
    for unit, flat in zip(model.spec.units, _loaded(model), strict=True):
        plain, quantized = unit.stored_views(flat, model.dtype)
        if quantized:  # their codes are not needed any more, and share the memory of the others
            plain = {name: tensor.clone() for name, tensor in plain.items()} | unit.dequantize(quantized, model.dtype)
        units.append({name: tensor.to(device) for name, tensor in plain.items()})
    return units.__getitem__


class Resident:
    """All weights on a device; quantized ones are dequantized whenever they are read."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._units, self._dtype = model.spec.units, model.dtype
        flats = [flat.to(device) for flat in _loaded(model)]
        self._stored = [unit.stored_views(flat, model.dtype) for unit, flat in zip(self._units, flats, strict=True)]

    def __call__(self, index: int) -> Mapping[str, Tensor]:
        return _dequantized(self._units[index], self._stored[index], self._dtype)


class Streamed:
    """Weights of blocks in host memory, SLOTS of them at a time on the device; all other weights on the device.

    Blocks are read in order, and after the last one comes the first one. While a block is read, the next one arrives.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        spec, self._dtype = model.spec, model.dtype
        self._units, self._layers = spec.units, spec.layers
        self._layer_of = {unit: number for number, layer in enumerate(spec.layers) for unit in layer.units}
        self._on_gpu = device.type == "cuda"
        sizes = [unit.nbytes(self._dtype.itemsize) for unit in spec.units]
        self._arena = Arena(sum(aligned(sizes[unit]) for unit in self._layer_of))
        flats = [
            self._arena.take(size, torch.uint8) if unit in self._layer_of else torch.zeros(size, dtype=torch.uint8)
            for unit, size in enumerate(sizes)
        ]
        if self._on_gpu:
            self._arena.lock()
        model.load(flats)
        self._host = {unit: flat for unit, flat in enumerate(flats) if unit in self._layer_of}
        others = (unit for unit in range(len(flats)) if unit not in self._layer_of)
        self._resident = {unit: spec.units[unit].stored_views(flats[unit].to(device), self._dtype) for unit in others}
        largest = max(sum(self._host[unit].nbytes for unit in layer.units) for layer in spec.layers)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._blocks: list[int | None] = [None] * SLOTS  # the block in each slot
        self._current = 0  # the slot of the block that is read
        self._copying = torch.cuda.Stream(device) if self._on_gpu else None
        if self._copying is not None:
            weakref.finalize(self, _end_copies, self._copying)  # before the host memory is unlocked
        self._arrived = [torch.cuda.Event() for _ in range(SLOTS)] if self._on_gpu else []

    @property
    def locking(self) -> Locking:
        """How much of the blocks is page-locked."""
        return self._arena.locking

    def __call__(self, index: int) -> Mapping[str, Tensor]:
        if index in self._resident:
            return _dequantized(self._units[index], self._resident[index], self._dtype)
        number = self._layer_of[index]
        slot = self._current = self._fetch(number)
        if self._on_gpu:
            torch.cuda.current_stream().wait_event(self._arrived[slot])
        self._fetch((number + 1) % len(self._layers))
        before = self._layers[number].units[: self._layers[number].units.index(index)]
        start = sum(self._host[unit].nbytes for unit in before)
        flat = self._slots[slot][start : start + self._host[index].nbytes]
        return _dequantized(self._units[index], self._units[index].stored_views(flat, self._dtype), self._dtype)

    def _fetch(self, number: int) -> int:
        """The slot of a block. One that is not there is copied over the block that was read before the current one."""
        if number in self._blocks:
            return self._blocks.index(number)
        slot = (self._current + 1) % SLOTS
        self._blocks[slot] = number
        if self._copying is None:
            self._copy(number, slot)
            return slot
        self._copying.wait_stream(torch.cuda.current_stream())  # the block that was there has been read
        with torch.cuda.stream(self._copying):
            self._copy(number, slot)
            self._arrived[slot].record()
        return slot

    def _copy(self, number: int, slot: int) -> None:
        start = 0
        for unit in self._layers[number].units:
            flat = self._host[unit]
            self._slots[slot][start : start + flat.nbytes].copy_(flat, non_blocking=True)
            start += flat.nbytes


def _end_copies(stream: torch.cuda.Stream) -> None:
    with suppress(RuntimeError):  # a GPU that has failed refuses every call
        stream.synchronize()


def _loaded(model: Model) -> list[Tensor]:
    """The bytes of each unit in host memory, as `unit.stored_views` describes them."""
    sizes = [unit.nbytes(model.dtype.itemsize) for unit in model.spec.units]
    with phase("allocating host memory", sum(sizes)) as allocating:
        flats = []
        for size in sizes:
            flats.append(torch.zeros(size, dtype=torch.uint8))
            allocating.add(size)
    model.load(flats)
    return flats


def _dequantized(unit: Unit, stored: UnitTensors, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The parameters of a unit."""
    plain, quantized = stored
    if not quantized:
        return plain
    found = dict(plain)
    for param in unit.quantized:
        codes = quantized[param.name]
        whole = torch.empty(param.numel, dtype=dtype, device=codes.codes.device)
        found[param.name] = param.dequantized_view(codes.dequantize(whole))
    return found
