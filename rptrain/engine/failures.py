"""Failures of GPUs, recognized by the text of an error: what failed and what to do about it. Imports no torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rptrain.engine.errors import EngineError
from rptrain.utils.errors import TrainingError, UserError, describe

Kind = Literal["memory", "hardware", "driver", "busy", "program", "lost", "other"]

# Words of CUDA, its libraries and Triton that say that an error is a GPU's.
_OF_A_GPU = re.compile(
    r"CUDA out of memory|CUDA (?:driver )?error|Triton Error \[CUDA\]|CUBLAS_STATUS_|CUDNN_STATUS_|cuDNN error"
)
_KINDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (  # the first match counts
    ("memory", ("out of memory", "_STATUS_ALLOC_FAILED")),
    ("hardware", ("ECC error", "NVLink error", "hardware stack error", "hardware error", "Memory was contained")),
    ("driver", ("no kernel image", "unsupported toolchain", "driver version is insufficient", "driver is a stub")),
    ("busy", ("busy or unavailable",)),
    (
        "program",
        (
            *("illegal memory access", "misaligned address", "illegal instruction", "invalid program counter"),
            *("device-side assert", "_STATUS_EXECUTION_FAILED"),
        ),
    ),
    (
        "lost",
        (
            *("launch failure", "device lost", "is lost", "launch timed out", "unknown error", "Unknown Error"),
            *("no CUDA-capable device", "invalid device ordinal", "system not yet initialized"),
        ),
    ),
)
_ADVICE: dict[Kind, str] = {
    "hardware": "The GPU has a hardware fault: reset it with `nvidia-smi --gpu-reset`, or have it serviced. Until "
    "then, leave it out with engine.devices.",
    "driver": "This build of torch, the driver and the GPU do not fit together: `rptrain doctor` says more.",
    "busy": "Another process has the GPU for itself: `nvidia-smi` shows it, and the compute mode, which "
    "`nvidia-smi -c DEFAULT` changes.",
    "lost": "The driver has lost the GPU or stopped its work: `nvidia-smi` shows whether it still answers, and "
    "`dmesg | grep -i xid` why. If it fails again, restart the machine or leave the GPU out with engine.devices.",
    "program": "A kernel failed. If it fails again, run with CUDA_LAUNCH_BLOCKING=1, which finds the kernel, and "
    "report the traceback.",
    "other": "`nvidia-smi` shows whether the GPU still answers. If it fails again, run with CUDA_LAUNCH_BLOCKING=1 and "
    "report the traceback.",
}
_IN_ENGINE = (
    "Close what else uses the GPU (`nvidia-smi` lists it), or use less of its memory: lower engine.vram_limit, or "
    "train.micro_batch_size in a new run."
)
_ELSEWHERE = (
    "Close what else uses the GPU (`nvidia-smi` lists it), or use less of its memory: lower engine.vram_limit to "
    "train, and choose the placement streamed or cpu to generate and chat."
)

_SLOT = re.compile(r"\d+:(F|FB|B)(\d+)-(\d+)@\d+r\d+m\d+-\d+(?: micro-batch (\d+))?(?: (.+))?")
_EVALUATION = re.compile(r"evaluation, layer (\d+)(?: micro-batch (\d+))?(?: (.+))?")
_PASSES = {"F": "forward pass", "FB": "forward and backward pass", "B": "backward pass"}
_WORK = {
    "input": "upload of activations",
    "output": "download of activations",
    "upload": "upload of weights",
    "download": "download of gradients",
    "download rounding": "rounding of gradients",
    "sums": "gradient accumulators",
    "partial sums": "upload of gradient sums",
    "losses": "download of losses",
    "preparing parameters": "preparation of weights",
}
SENTENCES = 3  # of an error's first line that are shown: how much memory was asked for, exists and is free


@dataclass(frozen=True)
class GpuFailure:
    """A failure of a GPU: what CUDA said, and where."""

    kind: Kind
    said: str
    device: str | None = None  # None outside the engine
    place: str = ""  # the stage and its pass

    @property
    def final(self) -> bool:
        """Whether the process can no longer use the GPU: every later call of CUDA fails, too."""
        return self.kind != "memory"

    def lines(self) -> Iterator[str]:
        """What failed, and what to do."""
        place = f" in the {self.place}" if self.place else ""
        yield f"{self.device or 'The GPU'} failed{place}: {self.said}"
        yield _ADVICE.get(self.kind) or (_IN_ENGINE if self.device else _ELSEWHERE)


def gpu_failure(error: BaseException) -> GpuFailure | None:
    """The failure of a GPU that an error or its cause tells of; None for any other error."""
    engine, cause = None, error
    while cause is not None:
        if isinstance(cause, TrainingError | UserError):  # which may quote another process's error
            return None
        if isinstance(cause, EngineError):
            engine = cause
        else:
            text = describe(cause).partition("\n")[0]  # the others are torch's advice, the same for every error
            if isinstance(cause, RuntimeError) and _OF_A_GPU.search(text):
                kinds: list[Kind] = [kind for kind, words in _KINDS if any(word in text for word in words)]
                kind = kinds[0] if kinds else "other"
                said = ". ".join(text.split(". ")[:SENTENCES]).rstrip(".")
                if engine is None:
                    return GpuFailure(kind, f"{said}.")
                return GpuFailure(kind, f"{said}.", engine.device, plain_place(engine.place))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def plain_place(place: str) -> str:
    """A place in the engine in words: "2:B3-5@0r0m0-3 micro-batch 1" is the "backward pass of layers 3-5, micro-batch
    1". Other places stay as they are; a thread that waits has none.
    """
    if (match := _SLOT.fullmatch(place)) is not None:
        kind, first, last, micro_batch, work = match.groups()
        computed = f"{_PASSES[kind]} of " + (f"layer {first}" if first == last else f"layers {first}-{last}")
    elif (match := _EVALUATION.fullmatch(place)) is not None:
        layer, micro_batch, work = match.groups()
        computed = f"evaluation of layer {layer}"
    else:
        return "" if place == "waiting" else place
    counted = "" if micro_batch is None else f", micro-batch {micro_batch}"
    of = f"{_WORK.get(work, work)} for the " if work else ""
    return f"{of}{computed}{counted}"
