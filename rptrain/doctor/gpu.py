"""Checks of the GPUs and their links, as reported by the driver and as measured with copies."""

import ctypes
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rptrain.doctor.checks import Check, check
from rptrain.doctor.failures import FAILURES, failed
from rptrain.engine.devices.accelerator import accelerator
from rptrain.engine.memory.page_locking import page_locked
from rptrain.machine.gpus import unusable
from rptrain.machine.hardware import check_alike
from rptrain.utils.errors import UserError
from rptrain.utils.nvml import Driver, Link
from rptrain.utils.page_locks import COST
from rptrain.utils.units import format_bytes

COPIED = 64 << 20  # bytes of a timed copy
REPEATS = 4
# Bytes per second of a PCIe lane in one direction, by generation.
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
LEAST = 0.6  # fraction of the link's rate; copies of page-locked memory reach 0.8 and more
WAIT_VALUE = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, of the driver API


@dataclass(frozen=True)
class CopyRates:
    """Bytes per second of copies to and from host memory: one at a time, and both at once."""

    up: float
    down: float
    both: float
    page_locked: bool = True  # the host memory


@dataclass(frozen=True)
class Gpu:
    device: str
    name: str
    memory: int  # bytes
    capability: str
    driver: str | None
    link: Link | None
    rates: CopyRates
    wait_value: bool | None  # whether a stream can wait for a value in memory; None: unknown


def examine() -> list[Check]:
    """One check per GPU, or one that says why there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [_none()]
    with Driver() as driver:
        return [_examine(driver, index) for index in range(count)]


def models() -> list[Check]:
    """A warning if the GPUs are of different models."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        check_alike("auto", [f"cuda:{index}" for index in range(count)])
    except UserError as error:
        return [check("GPUs", "of different models", str(error))]
    return []


def _examine(driver: Driver, index: int) -> Check:
    """Checks a GPU. Used memory and failures are warnings."""
    try:
        return describe(_look(driver, index))
    except FAILURES as error:
        return failed(f"cuda:{index}", error, device=f"cuda:{index}")


def _none() -> Check:
    """The check of a machine whose GPUs torch cannot use, or that has none."""
    if (found := unusable()) is not None:
        return check("GPU", found.reason, found.advice)
    return check("GPU", "none: workers run on the CPU", "for a GPU, install NVIDIA's driver; nvidia-smi must list it")


def describe(gpu: Gpu) -> Check:
    """A GPU in one line."""
    driver = "" if gpu.driver is None else f", driver {gpu.driver}"
    up, down, both = (f"{rate / 1e9:.1f}" for rate in (gpu.rates.up, gpu.rates.down, gpu.rates.both))
    text = (
        f"{gpu.name}, {format_bytes(gpu.memory)}, compute capability {gpu.capability}{driver}; {_link(gpu.link)}"
        f"{up} GB/s up, {down} down, {both} both ways together"
    )
    if gpu.wait_value is not None:
        text += f"; streams {'can' if gpu.wait_value else 'cannot'} wait for values"
    return check(gpu.device, text, _advice(gpu.link, gpu.rates), **asdict(gpu))


def _link(link: Link | None) -> str:
    if link is None or link.generation is None or link.width is None:
        return ""
    return f"PCIe {link.generation} x{link.width}, "


def _advice(link: Link | None, rates: CopyRates) -> str | None:
    if link is None or not link.width or not link.max_width or not link.generation or not link.max_generation:
        return None
    if link.width < link.max_width:
        return (
            f"the card could have {link.max_width} lanes and has {link.width}: seat it in another slot, "
            "or see what shares its lanes"
        )
    if link.generation < link.max_generation:
        return f"the link could be PCIe {link.max_generation}: see the setting of the slot in the firmware, and risers"
    if not rates.page_locked:
        return f"the copies are of pageable memory, because page-locking was refused: {COST}"
    carried = LANE.get(link.generation, 0) * link.width
    if min(rates.up, rates.down) < LEAST * carried:
        return f"the link carries {carried / 1e9:.0f} GB/s: see whether other devices share it, or the memory is busy"
    return None


def _look(driver: Driver, index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    handle = driver.gpu(str(properties.uuid))
    rates = measure(index)  # before the link is read, because an idle link slows down to save power
    return Gpu(
        f"cuda:{index}",
        properties.name,
        properties.total_memory,
        accelerator(index).target.version,
        driver.version,
        None if handle is None else driver.link(handle),
        rates,
        _can_wait(index),
    )


def measure(index: int) -> CopyRates:
    """Measures copies of COPIED bytes in each direction, REPEATS times."""
    with torch.cuda.device(index):
        device = [torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(2)]
        host = host_buffers()
        streams = [torch.cuda.Stream(index) for _ in range(2)]

        def seconds(*ways: int) -> float:
            torch.cuda.synchronize(index)
            start, ends = torch.cuda.Event(enable_timing=True), []
            start.record(streams[ways[0]])
            for way in ways:
                streams[way].wait_event(start)
                with torch.cuda.stream(streams[way]):
                    for _ in range(REPEATS):
                        pair = (device[0], host[0]) if way == 0 else (host[1], device[1])
                        pair[0].copy_(pair[1], non_blocking=True)
                    ends.append(torch.cuda.Event(enable_timing=True))
                    ends[-1].record(streams[way])
            torch.cuda.synchronize(index)
            return max(start.elapsed_time(end) for end in ends) / 1e3

        seconds(0, 1)  # the first copies wake the link
        moved = REPEATS * COPIED
        locked = all(buffer.is_pinned() for buffer in host)
        return CopyRates(moved / seconds(0), moved / seconds(1), 2 * moved / seconds(0, 1), locked)


def host_buffers() -> list[Tensor]:
    """Two buffers of COPIED bytes in host memory, which are page-locked if the system allows it."""
    return [page_locked(torch.empty(COPIED, dtype=torch.uint8)) for _ in range(2)]


def _can_wait(index: int) -> bool | None:
    """Asks the driver, which has the GPU open already; torch does not expose this attribute."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), index):
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(value), WAIT_VALUE, handle):
        return None
    return bool(value.value)
