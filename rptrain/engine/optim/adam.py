"""AdamW on the CPU: one fused pass over memory in native code (adam.c), or the same arithmetic with torch."""

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NotRequired, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from rptrain.engine.memory import moments
from rptrain.engine.memory.moments import CHUNK
from rptrain.engine.tree import additions
from rptrain.utils import native, numa
from rptrain.utils.native import ended, finish, suffix
from rptrain.utils.parallel import cores

LANES = 512  # as in adam.c
FALLBACK_CHUNK = 1 << 18  # elements: temporaries stay in the caches
NODE_THREADS = 32  # per NUMA node; int8 moments gain up to there, and each task of a thread takes the interpreter lock


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "count", "noise", "groups")),
        *((name, ctypes.c_void_p) for name in ("source", "grad", "target", "remainder", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in ("exp_avg_scale", "exp_avg_sq_scale", "masters", "grads")),
        *((name, ctypes.c_double) for name in ("grad_scale", "beta1", "beta2", "rest1", "rest2")),
        *((name, ctypes.c_double) for name in ("decay", "step_size", "root_scale", "eps")),
    )


def _library() -> ctypes.CDLL | None:
    return native.library("rptrain.engine.optim._adam")


def instruction_set() -> str | None:
    """A description of the instruction set of the compiled update; None if it was not compiled."""
    library = _library()
    if library is None:
        return None
    library.instruction_set.restype = ctypes.c_char_p
    return library.instruction_set().decode()


def default_threads() -> int:
    """Four fifths of the available cores of each NUMA node, at most NODE_THREADS."""
    shares = [node.share for node in numa.topology().nodes] or [cores() - cores() // 5]
    return max(1, sum(min(share, NODE_THREADS) for share in shares))


class UpdateArgs(TypedDict):
    """A range of a unit with equal weight decay: one-dimensional contiguous CPU tensors of one length.

    bfloat16 parameters have an int16 or uint16 `remainder` (see `UnitState`), a bfloat16 or float32 gradient and
    float32 moments. float16 parameters are rounded copies of float32 `masters`, and have a float16 or float32 gradient
    and float32 moments. float32 and float64 parameters have a gradient and moments of their own dtype, and neither
    `remainder` nor `masters`. Except with float64, moments may be in one of the small formats of moments.py: element i
    of the tensors is then rounded with the random number of `noise` + i, and `int8` needs whole blocks and a scale for
    each. `step` counts from 1. The gradient is first multiplied by `grad_scale`.
    """

    source: Tensor
    target: Tensor
    remainder: NotRequired[Tensor | None]
    masters: NotRequired[Tensor | None]
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: NotRequired[Tensor | None]
    exp_avg_sq_scale: NotRequired[Tensor | None]
    lr: float
    weight_decay: float
    step: int
    grad_scale: float
    noise: NotRequired[int]


class CpuAdam:
    """Updates flat buffers with AdamW (decoupled weight decay, bias correction; torch.optim.AdamW's maths).

    Results depend neither on `threads` nor on whether the native code (`native`) or torch runs. By default `threads` is
    `default_threads`; the other cores are left to the threads that launch work for GPUs. With several nodes, each
    thread is bound to the CPUs of one. Context manager: owns a thread pool.
    """

    def __init__(
        self,
        betas: tuple[float, float],
        eps: float,
        threads: int | None = None,
        *,
        force_fallback: bool = False,
    ) -> None:
        self.betas, self.eps = betas, eps
        self.threads = threads or default_threads()
        self._library = None if force_fallback else _library()
        places = deque(numa.topology().spread(self.threads))
        self.pool = ThreadPoolExecutor(self.threads, "adam", initializer=lambda: numa.bind(places.popleft()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.pool.shutdown()

    @property
    def native(self) -> bool:
        return self._library is not None

    def update(self, **part: Unpack[UpdateArgs]) -> None:
        """Writes the updated parameter `source` to `target`, which may be the same. Updates states in place."""
        finish(self.pool, self._calls(part))

    def begin(
        self, parts: Sequence[UpdateArgs], then: Callable[[], object], after: Sequence[Callable[[], object]] = ()
    ) -> Sequence[Future[object]]:
        """Submits several parts to the threads; the thread that finishes last calls `then`.

        More parts may be submitted meanwhile. Pass the result to `ended`; the tensors must live until then. With
        `after`, it returns once all parts are updated; the threads then make these calls, before `then`, and before
        they come to the next parts. Without parts the caller's thread calls `then`.
        """
        calls = [self._calls(part) for part in parts]
        if not parts:
            then()
            return ()
        if self.native:  # a thread visits all parts and takes what is left of each
            shared = [takers[0] for takers in calls]
            works = [shared] * max(len(takers) for takers in calls)
        else:
            works = [[call] for takers in calls for call in takers]
        if after:
            ended(self._submit(works, lambda: None))
            works = [iter(after)] * min(self.threads, len(after))  # of one iterator: a thread takes what is left
        return self._submit(works, then)

    def _submit(
        self, works: Sequence[Iterable[Callable[[], object]]], then: Callable[[], object]
    ) -> Sequence[Future[object]]:
        """Submits the calls of each thread; the thread that finishes last calls `then`."""
        left = deque(range(len(works)))

        def work(calls: Iterable[Callable[[], object]]) -> None:
            for call in calls:
                call()
            if left.pop() == 0:
                then()

        return [self.pool.submit(work, calls) for calls in works]

    def _calls(self, part: UpdateArgs) -> Sequence[Callable[[], object]]:
        """The calls that together update a part. Native code takes one call, for as many threads as are useful."""
        tensors: dict[str, Tensor] = {name: value for name, value in part.items() if isinstance(value, Tensor)}
        exp_avg, dtype = part["exp_avg"], part["source"].dtype
        assert part["step"] >= 1
        assert ("remainder" in tensors) == (dtype == torch.bfloat16)
        assert ("masters" in tensors) == (dtype == torch.float16)
        assert ("exp_avg_scale" in tensors) == (exp_avg.dtype == torch.int8)
        beta1, beta2 = self.betas
        lr, step, noise = part["lr"], part["step"], part.get("noise", 0)
        factors = {
            "grad_scale": part["grad_scale"],
            "beta1": beta1,
            "beta2": beta2,
            "rest1": 1 - beta1,
            "rest2": 1 - beta2,
            "decay": 1 - lr * part["weight_decay"],
            "step_size": lr / (1 - beta1**step),
            "root_scale": (1 - beta2**step) ** -0.5,
            "eps": self.eps,
        }
        if self._library:
            kinds = (dtype, part["grad"].dtype, exp_avg.dtype)
            return self._native(f"adam_{'_'.join(suffix(kind) for kind in kinds)}", tensors, factors, noise)
        pieces = {name: tensor.split(FALLBACK_CHUNK // _shared(name)) for name, tensor in tensors.items()}
        return [
            partial(_update, dict(zip(pieces, piece, strict=True)), noise + index * FALLBACK_CHUNK, **factors)
            for index, piece in enumerate(zip(*pieces.values(), strict=True))
        ]

    def squares(self, grad: Tensor, *others: Tensor) -> Tensor:
        """The sum of squares of each chunk of a flat buffer, of CHUNK elements, in float64 and in a fixed order.

        `others` are added to `grad` before, as a balanced binary tree, and are overwritten. Only float32 and float64
        are added.
        """
        grads = (grad, *others)
        sums = torch.empty(-(-len(grad) // CHUNK), dtype=torch.float64)
        if self._library:
            places = (ctypes.c_void_p * len(grads))(*(each.data_ptr() for each in grads))
            given = {"grads": ctypes.addressof(places), "groups": len(grads)}
            finish(self.pool, self._native(f"square_sum_{suffix(grad.dtype)}", {"grad": grad, "target": sums}, given))
        else:
            parts = zip(*(each.split(FALLBACK_CHUNK) for each in grads), strict=True)
            targets = sums.split(FALLBACK_CHUNK // CHUNK)
            finish(self.pool, [partial(_square_sums, part, to) for part, to in zip(parts, targets, strict=True)])
        return sums

    def _native(
        self, name: str, tensors: dict[str, Tensor], factors: Mapping[str, float], noise: int = 0
    ) -> Sequence[Callable[[], object]]:
        count = len(tensors["grad"])
        assert all(t.is_cpu and t.dim() == 1 and t.is_contiguous() for t in tensors.values())
        sizes = (len(tensor) * _shared(kind) for kind, tensor in tensors.items())
        assert all(size == count for size in sizes) or name.startswith("square_sum")
        job = _Job(count=count, noise=noise, **{name: t.data_ptr() for name, t in tensors.items()}, **factors)
        call = partial(getattr(self._library, name), ctypes.byref(job))
        return [call] * min(self.threads, -(-count // CHUNK))


def _shared(name: str) -> int:
    """The number of parameters per element of a buffer."""
    return moments.BLOCK if name.endswith("_scale") else 1


def _update(buffers: dict[str, Tensor], noise: int, **factors: float) -> None:
    """Updates a chunk operation by operation, as adam.c does; torch's fused operations round differently."""
    f: Any = factors
    source, grad, exp_avg, exp_avg_sq = (buffers[name] for name in ("source", "grad", "exp_avg", "exp_avg_sq"))
    small = exp_avg.dtype in (torch.bfloat16, torch.int8)
    if small:
        exp_avg, exp_avg_sq = moments.read(buffers)
    g = grad.to(exp_avg.dtype) * f["grad_scale"]
    exp_avg.mul_(f["beta1"]).add_(g * f["rest1"])
    exp_avg_sq.mul_(f["beta2"]).add_(g.square_().mul_(f["rest2"]))
    if small:
        moments.write(buffers, exp_avg, exp_avg_sq, noise)
    root = torch.from_numpy(np.sqrt(exp_avg_sq.numpy()))  # torch's vectorized root is not correctly rounded
    change = (exp_avg * f["step_size"]).div_(root.mul_(f["root_scale"]).add_(f["eps"]))
    if "masters" in buffers:
        buffers["target"].copy_(buffers["masters"].mul_(f["decay"]).sub_(change))
    elif "remainder" not in buffers:
        torch.sub(source * f["decay"], change, out=buffers["target"])
    else:
        split(join(source, buffers["remainder"]) * f["decay"] - change, buffers["target"], buffers["remainder"])


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master weights of a bfloat16 parameter and its remainder."""
    high, low = param.view(torch.int16).int(), remainder.view(torch.int16).int()
    return ((high << 16) + low).view(torch.float32)


def split(master: Tensor, param: Tensor, remainder: Tensor) -> None:
    """Splits float32 master weights into a bfloat16 parameter, rounded half up, and its remainder."""
    bits = master.view(torch.int32)
    param.view(torch.int16).copy_((bits + 0x8000) >> 16)
    remainder.view(torch.int16).copy_(bits)


def _square_sums(grads: Sequence[Tensor], sums: Tensor) -> None:
    """Adds `grads` into the first, and writes the sums of squares of its chunks to `sums`, in the order of adam.c."""
    for to, source in additions(len(grads)):
        grads[to].add_(grads[source])
    grad = grads[0]
    padding = -len(grad) % CHUNK
    squares = torch.nn.functional.pad(grad.double(), (0, padding)).square_().view(-1, CHUNK // LANES, LANES)
    lanes = squares[:, 0].clone()
    for row in range(1, CHUNK // LANES):
        lanes += squares[:, row]
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    sums.copy_(lanes[:, 0])
