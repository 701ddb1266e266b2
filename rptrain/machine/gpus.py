"""The GPUs that torch can use, by the names of engine.devices; and why it uses none of those that the driver lists."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rptrain.engine.devices.accelerator import listed
from rptrain.machine import rates
from rptrain.utils.errors import UserError
from rptrain.utils.nvml import Driver
from rptrain.utils.parallel import cores
from rptrain.utils.text import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDING = ("", "-1", "none", "nodevfiles")  # its values that hide all GPUs on purpose; Slurm writes the last one
ON_CPU = '"cpu:2" is two workers on the CPU'


@dataclass(frozen=True)
class Unusable:
    """Why torch can use none of the GPUs that the driver lists, and what to do. `hidden`: a person has hidden them."""

    reason: str
    advice: str
    hidden: bool = False

    def __str__(self) -> str:
        return f"{self.reason}: {self.advice}"


def gpu_count() -> int:
    """The GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def unusable() -> Unusable | None:
    """Why torch can use no GPU; None if it can, and on a machine without GPUs or without NVIDIA's driver."""
    if gpu_count():
        return None
    with Driver() as driver:
        if driver.problem is not None:
            advice = (
                "`nvidia-smi` must list the GPUs; restart the container if it has lost them, or the machine after an "
                "update of the driver"
            )
            return Unusable(f"NVIDIA's driver fails ({driver.problem})", advice)
        names = [gpu.name for gpu in listed(driver) if gpu.target.triton]  # older ones are for displays
        return _why(names, driver) if names else None


def _why(names: list[str], driver: Driver) -> Unusable:
    gpus, build = f"{counted(len(names), 'GPU')} ({', '.join(dict.fromkeys(names))})", torch.version.cuda
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip().lower() in HIDING:
        return Unusable(f'{VISIBLE} = "{visible}" hides {gpus}', f"unset {VISIBLE} to use them", hidden=True)
    if build is None:
        release = torch.__version__.partition("+")[0]
        advice = f"install a CUDA build, with `pip install --force-reinstall torch=={release}`"
        return Unusable(f"this machine has {gpus}, but torch {torch.__version__} is built without CUDA", advice)
    if driver.cuda is not None and driver.cuda[0] < int(build.partition(".")[0]):
        supported = ".".join(map(str, driver.cuda))
        return Unusable(
            f"this machine has {gpus}, but its driver {driver.version} supports CUDA {supported}, and torch "
            f"{torch.__version__} is built for CUDA {build}",
            f"update the driver, or install a build of torch for CUDA {driver.cuda[0]}",
        )
    if visible is not None:
        advice = f"unset {VISIBLE}, or name GPUs as `nvidia-smi -L` lists them"
        return Unusable(f'{VISIBLE} = "{visible}" names none of this machine\'s {gpus}', advice)
    try:
        torch.cuda.init()
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
    else:
        said = "it finds none"
    advice = "`nvidia-smi` and the kernel log (`dmesg`) may say why; after an update of the driver, restart the machine"
    return Unusable(f"torch {torch.__version__} cannot use this machine's {gpus} ({said})", advice)


def resolve(text: str) -> tuple[str, ...]:
    """Device names, one per worker, from "auto", "cuda", "cuda:0,GPU-8a1b" or "cpu:N".

    "auto" is every GPU, or a CPU worker per core on a machine without GPUs and where they are hidden on purpose. Raises
    UserError if a GPU does not exist, is named twice, or cannot be used by torch.
    """
    if text.startswith("cpu"):
        return tuple(f"cpu:{index}" for index in range(int(text.partition(":")[2] or 1)))
    count = gpu_count()
    if not count:
        found = unusable()
        if text == "auto" and (found is None or found.hidden):
            return resolve(f"cpu:{cores()}")
        why = ", but this machine has no CUDA GPU" if found is None else f": {found}"
        raise UserError(f'engine.devices = "{text}"{why}; {ON_CPU}')
    if text in ("auto", "cuda"):
        return tuple(f"cuda:{index}" for index in range(count))
    named = list(_indices(text, count))
    if len(set(named)) < len(named):
        twice = next(index for index in named if named.count(index) > 1)
        raise UserError(f'engine.devices = "{text}" names cuda:{twice} twice: name each GPU once')
    return tuple(f"cuda:{index}" for index in named)


def _indices(text: str, count: int) -> Iterator[int]:
    """The indices of torch from those and from (beginnings of) UUIDs."""
    visible = os.environ.get(VISIBLE)
    last = f" to cuda:{count - 1}" if count > 1 else ""
    there = f"{counted(count, 'GPU')}, cuda:0{last}" + (f' ({VISIBLE} = "{visible}")' if visible else "")
    for name in text.partition(":")[2].split(","):
        if name.isdecimal():
            if int(name) >= count:
                raise UserError(f'engine.devices = "{text}", but this machine has {there}; {ON_CPU}')
            yield int(name)
            continue
        begin = name.partition("-")[2].lower()
        matching = [index for index in range(count) if rates.uuid(index).lower().startswith(begin)]
        if len(matching) != 1:
            found = "several GPUs have" if matching else f"none of {there} has"
            raise UserError(
                f'engine.devices = "{text}", but {found} a UUID that begins with {name}: `nvidia-smi -L` lists them'
            )
        yield matching[0]
