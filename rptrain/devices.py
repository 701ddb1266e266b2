"""From what the config says of devices to devices that are there, and what memory each may use."""

import os
from collections.abc import Sequence

import torch

from rptrain.engine.memory import available_bytes
from rptrain.errors import UserError

MARGIN = 256 << 20  # bytes of a GPU left alone where no limit is set: displays, other processes' growth


def resolve(text: str) -> tuple[str, ...]:
    """Device names, one a worker: "auto" is every GPU, or a CPU worker a core; "cuda", "cuda:0,1", "cpu:N".

    UserError for a GPU that is not there.
    """
    if text.startswith("cpu"):
        return tuple(f"cpu:{index}" for index in range(int(text.partition(":")[2] or 1)))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto" and not count:
        return resolve(f"cpu:{len(os.sched_getaffinity(0))}")
    wanted = range(count) if text in ("auto", "cuda") else [int(i) for i in text.partition(":")[2].split(",")]
    missing = [index for index in wanted if index >= count]
    if missing or not count:
        there = f"{count} GPUs, cuda:0 to cuda:{count - 1}" if count else "no CUDA GPU"
        raise UserError(f'engine.devices = "{text}", but this machine has {there}; "cpu:2" is two workers on the CPU')
    return tuple(f"cuda:{index}" for index in wanted)


def allocator_limit(devices: Sequence[str], vram_limit: int | None) -> int | None:
    """Bytes that tensors may take on each GPU: the limit, or what is free, less the CUDA context. None on the CPU.

    UserError where the limit is more than a GPU has, or less than the context takes.
    """
    from rptrain.engine.cuda import context_bytes

    limits = []
    for name in devices:
        if not name.startswith("cuda"):
            continue
        index = int(name.partition(":")[2])
        context = context_bytes(index)
        free, total = torch.cuda.mem_get_info(index)
        if vram_limit is not None and vram_limit > total:
            raise UserError(f"engine.vram_limit is {readable(vram_limit)}, but {name} has {readable(total)}")
        limit = min(vram_limit - context, free) if vram_limit is not None else free - MARGIN
        if limit <= 0:
            raise UserError(
                f"engine.vram_limit leaves nothing for tensors: {name} has {readable(free)} free, and the CUDA context "
                f"takes {readable(context)}"
            )
        limits.append(limit)
    return min(limits, default=None)


def check_host(needed: int, host_limit: int | None) -> None:
    """UserError if `needed` bytes are more than the limit, or than the host has free where no limit is set."""
    allowed = available_bytes() if host_limit is None else host_limit
    if needed > allowed:
        source = "is free on this machine" if host_limit is None else "engine.host_limit allows"
        raise UserError(
            f"the run needs {readable(needed)} of host memory for weights, gradients, optimizer states and "
            f"activations, but {readable(allowed)} {source}: lower train.global_batch_size or data.max_length, set "
            'engine.round_size, or use optim.update = "sync"'
        )


def readable(nbytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
