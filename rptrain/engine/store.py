"""Host memory: the flat parameter, gradient and optimizer buffers of every unit, and the arena that holds them."""

import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from rptrain.engine import wire
from rptrain.engine.distributed.share import Share
from rptrain.engine.optim.moments import Moments, layout
from rptrain.engine.page_locking import Locking
from rptrain.kernels.quant import Quantized
from rptrain.models.params import Unit
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.weights.file_backed import FileBackedUnit, FileBackedWeights, file_backed_units
from rptrain.models.weights.quantized import readable
from rptrain.utils import numa
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import Phase, phase

ALIGNMENT = mmap.PAGESIZE  # bytes: every tensor of an arena is page-locked separately
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
RESERVE = 8  # after a refusal, one in this many locked bytes is unlocked: batches and the driver itself lock some too
WHOLE = ("params", "grad")  # buffers with all elements of a unit, also if several processes train the model
COPIED = 1 << 22  # elements copied at a time, so that all threads have work
REST = {  # buffers that complete float32 master weights, by the parameters' dtype
    torch.bfloat16: {"remainder": torch.int16},
    torch.float16: {"masters": torch.float32},
}


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Host memory of an exact size, cut into tensors; interleaved over NUMA nodes, and page-locked for CUDA.

    The memory is mapped and then registered, because torch's pinned allocator rounds sizes up to powers of two. Each
    tensor is registered separately: a copy must not cross from one registration into another. Context manager.
    """

    def __init__(self, nbytes: int) -> None:
        self._size = max(aligned(nbytes), ALIGNMENT)
        self._map: mmap.mmap | None = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):  # the first: first touch and registration are faster
            with suppress(OSError):  # kernels without transparent huge pages refuse it
                self._map.madvise(advice)
        self._base = torch.frombuffer(self._map, dtype=torch.uint8)
        numa.topology().interleave(self._base.data_ptr(), self._size)  # every GPU and AdamW use all weights
        self._used = 0
        self._pieces: list[tuple[Tensor, bool]] = []  # bytes in use, in whole pages, and whether GPUs copy them
        self._registered: dict[int, int] = {}  # bytes by address, in the order in which they were locked
        # Memory that is unmapped while registered poisons later registrations of its addresses.
        self._unregister = weakref.finalize(self, _unregister, self._registered)

    def take(self, numel: int, dtype: torch.dtype, *, copied: bool = True) -> Tensor:
        """Returns the next `numel` elements, zero-filled, on pages of their own. `copied`: whether GPUs copy them."""
        nbytes = numel * dtype.itemsize
        assert self._used + nbytes <= self._size, (self._used, nbytes, self._size)
        piece = self._base[self._used : self._used + aligned(nbytes)]
        if nbytes:  # CUDA registers no empty memory
            self._pieces.append((piece, copied))
        self._used += aligned(nbytes)
        return piece[:nbytes].view(dtype)

    def lock(self) -> None:
        """Page-locks all tensors taken so far, before anything is written to them: first those that GPUs copy.

        If the system refuses some of these, the others stay locked, less a RESERVE. If it refuses one that only the CPU
        uses, all of that kind stay pageable, which leaves the room to others.
        """
        with phase("page-locking host memory", sum(len(piece) for piece, _ in self._pieces)) as locking:
            if not self._register([piece for piece, copied in self._pieces if copied], locking):
                self.unlock(self._locked // RESERVE)
                return
            before = self._locked
            if not self._register([piece for piece, copied in self._pieces if not copied], locking):
                self.unlock(self._locked - before)

    def unlock(self, nbytes: int) -> int:
        """Unlocks tensors, the last locked first, until these are `nbytes` or all. Returns how many bytes they are."""
        return _unregister(self._registered, nbytes)

    @property
    def locking(self) -> Locking:
        """What is page-locked of the tensors that GPUs copy."""
        copied = [range(piece.data_ptr(), piece.data_ptr() + len(piece)) for piece, copied in self._pieces if copied]
        return Locking(sum(map(len, copied)), tuple(one for one in copied if one.start not in self._registered))

    @property
    def _locked(self) -> int:
        return sum(self._registered.values())

    def _register(self, pieces: list[Tensor], locking: Phase) -> bool:
        """Registers tensors that are not yet. Returns whether all are.

        After a refusal, only smaller ones are tried. A refusal leaves an error in CUDA's runtime that the next kernel
        launch of the same thread would report as its own; the threads of `in_parallel` end before that.
        """
        cudart, refused = _cudart(), self._size + 1  # bytes of the smallest that was refused

        def register(piece: Tensor) -> None:
            nonlocal refused
            address, nbytes = piece.data_ptr(), len(piece)
            if nbytes >= refused or address in self._registered:
                return
            # A thread clears pages at a few GB/s, by a write to each as within the call that registers them. Behind the
            # writes that call is short; others write meanwhile.
            piece[::ALIGNMENT].zero_()
            if int(cudart.cudaHostRegister(address, nbytes, PORTABLE)) == 0:
                self._registered[address] = nbytes
            else:
                refused = min(refused, nbytes)

        in_parallel(register, sorted(pieces, key=len, reverse=True), done=lambda piece: locking.add(len(piece)))
        return refused > self._size

    def close(self) -> None:
        """Unlocks the memory. It is unmapped when its last tensor is deleted, and never before it is unlocked."""
        with phase("unlocking host memory", unit=""):
            self._unregister()
        self._pieces.clear()
        self._base, self._map = self._base.new_empty(0), None

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unregister(registered: dict[int, int], nbytes: float = inf) -> int:
    done = 0
    while registered and done < nbytes:
        address, size = registered.popitem()
        _cudart().cudaHostUnregister(address)
        done += size
    return done


@dataclass
class UnitState:
    """The flat buffers of a unit, each of `unit.numel` elements, except scales of blocks in `moments`.

    If several processes train the model, this one updates the elements in `own`. Moments, remainder and masters are of
    these only.

    A frozen unit has only parameters, in one generation, and no `grads`. There is a gradient for each group of replicas
    that computes one; `grad`, the first, becomes their sum. The parameters of a quantized unit are bytes, as
    `unit.held` describes; `views` has the parameters that are not in `quantized`. A `file_backed` unit stays in its
    files, and its `params` is empty.

    There are two generations in async (one is read by the devices while the optimizer writes the other) and one in
    sync. `current` is the index of W_T, `before` the index of W_{T-1}; they are equal after a skipped step. Generations
    are those of `params`, except in a `wired` unit (models/params.py): devices read its `wire`, whose generations
    they are then, and `params` has W_T alone, updated in place. W_{T-1} is left in the wire format only.

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
    wire: list[Tensor] = field(default_factory=list)  # in bytes; see engine/wire.py
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


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which devices accumulate gradients, and of `fp32` moments."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ModelStore:
    """The host's copy of a model and its training state: one UnitState for each unit of the spec, in order.

    Bytes per parameter, bfloat16: sync 2 + 2 + 2 + 8 = 14, async 16; float16: sync 2 + 4 + 2 + 8 = 16, async 18. With
    several rounds the gradient is a float32 partial sum, which takes 2 more. Instead of 8 bytes, moments take 4 as
    `bf16` and 2 1/16 as `int8`. A wired parameter in FP8 has one generation of its own and codes of 1 byte, in async
    twice: sync 15, async 16. A frozen parameter takes 2, or what its format needs (models/transforms/quantize.py).
    Units in `file_backed` take none; their files are closed with the store.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        generations: int,
        wide_grad: bool = False,
        replicas: int = 1,
        moments: Moments = "fp32",
        lock: bool = False,
        file_backed: FileBackedWeights | None = None,
        share: Share | None = None,
    ) -> None:
        """`replicas`: the number of groups that compute partial gradients, which are then `wide_grad`. `share`: that of
        this process, if several train the model.
        """
        assert wide_grad or replicas == 1
        self.share = share
        self.spec, self.dtype, self.generations, self.wide_grad = spec, dtype, generations, wide_grad
        self.replicas, self._file_backed = replicas, file_backed
        self._layout = _state_dtypes(dtype, generations, wide_grad, moments, replicas)
        sizes = _sizes(spec, dtype, self._layout, file_backed=file_backed is not None, share=share)
        self._arena = Arena(sum(sizes.values()))
        self.units = [self._unit(index, unit) for index, unit in enumerate(spec.units)]
        if lock:
            self._arena.lock()

    @staticmethod
    def sizes(
        spec: ModelShape,
        dtype: torch.dtype,
        *,
        generations: int,
        wide_grad: bool = False,
        replicas: int = 1,
        moments: Moments = "fp32",
        file_backed: bool = False,
        share: Share | None = None,
        copied: bool = False,
    ) -> dict[str, int]:
        """Bytes of host memory that a store takes, by buffer: "frozen", "params", "grad", "exp_avg", …

        `copied`: only of what GPUs copy.
        """
        layout = _state_dtypes(dtype, generations, wide_grad, moments, replicas)
        return _sizes(spec, dtype, layout, file_backed=file_backed, share=share, copied=copied)

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

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients are downloaded."""
        return accumulate_dtype(self.dtype) if self.wide_grad else self.dtype

    def _unit(self, index: int, unit: Unit) -> UnitState:
        if self._file_backed is not None and index in self._file_backed.units:
            return UnitState(unit, [], [], {}, None, file_backed=self._file_backed.units[index])
        if unit.mixed:
            flat = self._arena.take(
                unit.nbytes(self.dtype.itemsize), torch.uint8, copied=_copied(self.spec, index, "params")
            )
            plain, quantized = unit.held(flat, self.dtype)
            return UnitState(unit, [flat], [], {}, None, views=[plain], quantized=quantized)
        buffers: dict[str, list[Tensor]] = {}
        sent = [unit.wire_bytes(self.dtype.itemsize)] * self.generations if unit.wired else []
        own = _own(self.spec, index, self.share)
        for name, dtype, shared in _of(self.spec, index, self._layout):
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
        return readable(self.spec, self.held)(unit, name)

    def held(self, unit: int, name: str) -> Tensor | Quantized:
        """A parameter of the newest generation in its stored form, to be filled; a copy for a file-backed unit."""
        state = self.units[unit]
        if state.file_backed is not None:
            return state.file_backed.held(name)
        return state.quantized[name] if name in state.quantized else state.views[state.newest][name]

    def weights(self, unit: int) -> dict[str, Tensor]:
        """Every parameter of a unit, newest generation; quantized ones dequantized."""
        state = self.units[unit]
        if state.file_backed is not None:
            return {param.name: self.view(unit, param.name) for param in state.unit.params}
        return state.views[state.newest] | state.unit.dequantize(state.quantized, self.dtype)

    def loaded(self) -> None:
        """Completes the state after weights were written through `held`: the other generation, W_{-1} = W_0, both in
        the wire format, and separate master weights.
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


Layout = Sequence[tuple[str, torch.dtype, int]]  # buffers: name, dtype, elements of a unit per entry


def _state_dtypes(dtype: torch.dtype, generations: int, wide_grad: bool, moments: Moments, replicas: int) -> Layout:
    """The buffers of a trainable unit."""
    wide = accumulate_dtype(dtype)
    buffers = [*[("params", dtype, 1)] * generations, *[("grad", wide if wide_grad else dtype, 1)] * replicas]
    buffers += layout(moments, wide)
    return [*buffers, *((name, kind, 1) for name, kind in REST.get(dtype, {}).items())]


def _of(spec: ModelShape, index: int, layout: Layout) -> Layout:
    """The buffers of a unit, without the wire; a frozen one has only its parameters, in one generation.

    An embedding that is not tied has one gradient: the host computes it.
    """
    unit = spec.units[index]
    if not unit.trainable:
        return layout[:1]
    if index == 0 and not spec.tied:
        grads = [buffer for buffer in layout if buffer[0] == "grad"]
        layout = [*(buffer for buffer in layout if buffer[0] != "grad"), grads[0]]
    return [layout[0], *(buffer for buffer in layout if buffer[0] != "params")] if unit.wired else layout


def _copied(spec: ModelShape, index: int, name: str) -> bool:
    """Whether GPUs copy a buffer of a unit; they copy every wire. The host computes an embedding that is not tied."""
    if index == 0 and not spec.tied:
        return False
    return name == "grad" or (name == "params" and not spec.units[index].wired)


def _own(spec: ModelShape, unit: int, share: Share | None) -> slice:
    """The elements of a unit whose optimizer state this process has."""
    return slice(0, spec.units[unit].numel) if share is None else share.part(spec, unit)


def _sizes(
    spec: ModelShape,
    dtype: torch.dtype,
    layout: Layout,
    *,
    file_backed: bool,
    share: Share | None,
    copied: bool = False,
) -> dict[str, int]:
    sizes = {"frozen": frozen_bytes(spec, dtype, file_backed=file_backed)}
    if copied and 0 in spec.frozen and not _copied(spec, 0, "params"):
        sizes["frozen"] -= aligned(spec.units[0].nbytes(dtype.itemsize))
    trained = spec.trained(range(len(spec.units)))
    for index in trained:
        own = _own(spec, index, share)
        for name, kind, shared in _of(spec, index, layout):
            if copied and not _copied(spec, index, name):
                continue
            numel = spec.units[index].numel if name in WHOLE else own.stop - own.start
            sizes[name] = sizes.get(name, 0) + aligned(numel // shared * kind.itemsize)
    units = [spec.units[index] for index in trained]
    if wired := sum(aligned(unit.wire_bytes(dtype.itemsize)) for unit in units if unit.wired):
        sizes["wire"] = wired * sum(name == "params" for name, _, _ in layout)
    return sizes


def frozen_bytes(spec: ModelShape, dtype: torch.dtype, *, file_backed: bool = False) -> int:
    """Bytes of the frozen units, without the file-backed ones if `file_backed`."""
    held = {*spec.frozen} - ({*file_backed_units(spec)} if file_backed else set())
    return sum(aligned(spec.units[index].nbytes(dtype.itemsize)) for index in held)
