"""Host memory: the flat parameter, gradient and optimizer buffers of every unit."""

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from rptrain.engine.memory import moments
from rptrain.engine.memory.arena import Arena, aligned
from rptrain.engine.memory.page_locking import Locking
from rptrain.engine.memory.share import Share
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.memory.unit_state import UnitState
from rptrain.kernels.quant import Quantized
from rptrain.models.params import Unit
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.weights.file_backed import FileBackedUnit, FileBackedWeights, file_backed_units
from rptrain.models.weights.quantized import readable
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase

WHOLE = ("params", "grad")  # buffers with all elements of a unit, also if several processes train the model
COPIED = 1 << 22  # elements copied at a time, so that all threads have work
REST = {  # buffers that complete float32 master weights, by the parameters' dtype
    torch.bfloat16: {"remainder": torch.int16},
    torch.float16: {"masters": torch.float32},
}


class ModelStore:
    """The host's copy of a model and its training state: one UnitState for each unit of the spec, in order.

    Bytes per parameter, bfloat16: sync 2 + 2 + 2 + 8 = 14, async 16; float16: sync 2 + 4 + 2 + 8 = 16, async 18. With
    several rounds the gradient is a float32 partial sum, which takes 2 more. Instead of 8 bytes, moments take 4 as
    `bf16` and 2 1/16 as `int8`. A wired parameter in FP8 has one generation of its own and codes of 1 byte, in async
    twice: sync 15, async 16. A frozen parameter takes 2, or what its format needs (models/weights/quantized.py). Units
    in `file_backed` take none; their files are closed with the store. A unit with a type of its own takes what a model
    in that type does.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: StepLayout,
        *,
        lock: bool = False,
        file_backed: FileBackedWeights | None = None,
    ) -> None:
        """`lock`: whether memory is page-locked for GPUs. `layout.file_backed` says whether `file_backed` is given."""
        assert layout.wide_grad or layout.replicas == 1
        assert layout.file_backed == (file_backed is not None)
        self.spec, self.layout, self._file_backed = spec, layout, file_backed
        self._arena = Arena(sum(self.sizes(spec, layout).values()))
        self.units = [self._unit(index, unit) for index, unit in enumerate(spec.units)]
        if lock:
            self._arena.lock()

    @staticmethod
    def sizes(spec: ModelShape, layout: StepLayout, *, copied: bool = False) -> dict[str, int]:
        """Bytes of host memory that a store takes, by buffer: "frozen", "params", "grad", "exp_avg", …

        `copied`: only of what GPUs copy.
        """
        dtype = layout.dtype
        sizes = {"frozen": frozen_bytes(spec, dtype, file_backed=layout.file_backed)}
        if copied and 0 in spec.frozen and not _copied(spec, 0, "params"):
            sizes["frozen"] -= aligned(spec.units[0].nbytes(dtype.itemsize))
        trained = spec.trained(range(len(spec.units)))
        for index in trained:
            own = _own(spec, index, layout.share)
            for name, kind, shared in _buffers(spec, index, layout):
                if copied and not _copied(spec, index, name):
                    continue
                numel = spec.units[index].numel if name in WHOLE else own.stop - own.start
                sizes[name] = sizes.get(name, 0) + aligned(numel // shared * kind.itemsize)
        units = [spec.units[index] for index in trained]
        if wired := sum(aligned(unit.wire_bytes(dtype.itemsize)) for unit in units if unit.wired):
            sizes["wire"] = wired * layout.generations
        return sizes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights of units without a type of their own."""
        return self.layout.dtype

    @property
    def locking(self) -> Locking:
        return self._arena.locking

    def unlock(self, nbytes: int) -> int:
        """Unlocks memory for others (Arena.unlock)."""
        return self._arena.unlock(nbytes)

    @property
    def in_memory(self) -> tuple[int, ...]:
        """The units that are not file-backed."""
        return tuple(index for index, state in enumerate(self.units) if state.file_backed is None)

    @property
    def file_backed(self) -> dict[int, FileBackedUnit]:
        """The file-backed units by index."""
        return {} if self._file_backed is None else self._file_backed.units

    def _unit(self, index: int, unit: Unit) -> UnitState:
        if self._file_backed is not None and index in self._file_backed.units:
            return UnitState(unit, [], [], {}, None, file_backed=self._file_backed.units[index])
        if unit.mixed:
            flat = self._arena.take(
                unit.nbytes(self.dtype.itemsize), torch.uint8, copied=_copied(self.spec, index, "params")
            )
            plain, quantized = unit.stored_views(flat, self.dtype)
            return UnitState(unit, [flat], [], {}, None, views=[plain], quantized=quantized)
        buffers: dict[str, list[Tensor]] = {}
        sent = [unit.wire_bytes(self.dtype.itemsize)] * self.layout.generations if unit.wired else []
        own = _own(self.spec, index, self.layout.share)
        for name, dtype, shared in _buffers(self.spec, index, self.layout):
            numel = unit.numel if name in WHOLE else own.stop - own.start
            taken = self._arena.take(numel // shared, dtype, copied=_copied(self.spec, index, name))
            buffers.setdefault(name, []).append(taken)
        return UnitState(
            unit,
            params=buffers["params"],
            grads=buffers.get("grad", []),
            moments={name: buffer for name, (buffer, *_) in buffers.items() if name.startswith("exp_avg")},
            remainder=buffers["remainder"][0] if "remainder" in buffers else None,
            masters=buffers["masters"][0] if "masters" in buffers else None,
            wire=[self._arena.take(nbytes, torch.uint8) for nbytes in sent],
            own=own,
        )

    def view(self, unit: int, name: str) -> Tensor:
        """A parameter of the newest generation, W_T; a copy if it is quantized (dequantized) or file-backed."""
        return readable(self.spec, self.stored_view)(unit, name)

    def stored_view(self, unit: int, name: str) -> Tensor | Quantized:
        """A parameter of the newest generation in its stored form, to be filled; a copy for a file-backed unit."""
        state = self.units[unit]
        if state.file_backed is not None:
            return state.file_backed.stored(name)
        return state.quantized[name] if name in state.quantized else state.views[state.newest][name]

    def weights(self, unit: int) -> dict[str, Tensor]:
        """Every parameter of a unit, newest generation; quantized ones dequantized."""
        state = self.units[unit]
        if state.file_backed is not None:
            return {param.name: self.view(unit, param.name) for param in state.unit.params}
        return state.views[state.newest] | state.unit.dequantize(state.quantized, self.dtype)

    def loaded(self) -> None:
        """Completes the state after weights were written through `stored_view`: the other generation, W_{-1} = W_0,
        both in the wire format, and separate master weights.
        """
        doubled = [state for state in self.units if len(state.params) == 2]
        pairs = [(state.params[state.spare], state.params[state.current]) for state in doubled]
        pairs += [
            (state.masters, state.params[state.newest][state.own]) for state in self.units if state.masters is not None
        ]
        pieces = [piece for pair in pairs for piece in zip(*(flat.split(COPIED) for flat in pair), strict=True)]
        with phase("copying weights", sum(target.nbytes for target, _ in pieces)) as copying:
            in_parallel(lambda piece: piece[0].copy_(piece[1]), pieces, done=lambda piece: copying.add(piece[0].nbytes))
        wired = (state.wire_writes(generation) for state in self.units for generation in range(len(state.wire)))
        with phase("quantizing weights for the devices", unit=""):
            in_parallel(lambda write: write(), (write for writes in wired for write in writes))

    def close(self) -> None:
        self._arena.close()
        if self._file_backed is not None:
            self._file_backed.close()

    def __enter__(self) -> "ModelStore":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


Buffers = Sequence[tuple[str, torch.dtype, int]]  # name, dtype, elements of a unit per entry


def _buffers(spec: ModelShape, index: int, layout: StepLayout) -> Buffers:
    """The buffers of a unit, without the wire; a frozen one has only its parameters, in one generation.

    An embedding that is not tied has one gradient: the host computes it.
    """
    unit = spec.units[index]
    dtype = unit.dtype_in(layout.dtype)
    params, grad = ("params", dtype, 1), ("grad", layout.grad_dtype_of(unit), 1)
    if not unit.trainable:
        return [params]
    generations = 1 if unit.wired else layout.generations
    grads = 1 if index == 0 and not spec.tied else layout.replicas
    rest = ((name, kind, 1) for name, kind in REST.get(dtype, {}).items())
    averages = moments.layout(layout.moments, layout.wide)
    return [*[params] * generations, *[grad] * grads, *averages, *rest]


def _copied(spec: ModelShape, index: int, name: str) -> bool:
    """Whether GPUs copy a buffer of a unit; they copy every wire. The host computes an embedding that is not tied."""
    if index == 0 and not spec.tied:
        return False
    return name == "grad" or (name == "params" and not spec.units[index].wired)


def _own(spec: ModelShape, unit: int, share: Share | None) -> slice:
    """The elements of a unit whose optimizer state this process has."""
    return slice(0, spec.units[unit].numel) if share is None else share.part(spec, unit)


def frozen_bytes(spec: ModelShape, dtype: torch.dtype, *, file_backed: bool = False) -> int:
    """Bytes of the frozen units, without the file-backed ones if `file_backed`."""
    units = {*spec.frozen} - ({*file_backed_units(spec)} if file_backed else set())
    return sum(aligned(spec.units[index].nbytes(dtype.itemsize)) for index in units)
