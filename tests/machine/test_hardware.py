"""Machines that are here, and planned ones: how many devices, and what memory there is of each."""

import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from rptrain.config.schema import Engine
from rptrain.engine.distributed.launch import Launch
from rptrain.machine import hardware
from rptrain.machine.hardware import CONTEXT, MARGIN, Gpu, Hardware, gpu_memory, here, installed_for, planned, usable
from rptrain.models.families.registry import build
from rptrain.preflight.model import for_hardware
from rptrain.schedule.machine import CARDS, CPU, Machine, Rates, card_named
from rptrain.utils.errors import UserError
from tests.engine import plain
from tests.run_tools import write_config

GIB = 1 << 30
CARD = CARDS["rtx4090"]


def test_a_kernel_that_does_not_tell_what_is_shared(monkeypatch):
    monkeypatch.setattr(psutil.Process, "memory_full_info", psutil.Process.memory_info)  # as psutil without smaps
    assert hardware.program_bytes() > 1 << 20


def test_workers_on_the_cpu_have_the_hosts_memory():
    found = here(Engine(devices="cpu:3"))
    assert (found.devices, found.gpus, found.tensor_bytes, found.machine.card) == (3, (), None, CPU)
    assert found.here and found.host_source == "free" and found.host == found.host_most
    assert found.host and found.program < found.host
    limited = here(Engine(devices="cpu:3", host_limit=5 * GIB))
    assert (limited.host, limited.host_source) == (5 * GIB, "engine.host_limit")


def test_processes_of_a_machine_share_its_devices_memory_and_threads(monkeypatch):
    monkeypatch.setattr(hardware, "program_bytes", lambda: GIB)
    monkeypatch.setattr(hardware, "available_bytes", lambda: 120 * GIB)

    def process(rank: int, local_rank: int, **settings: Any) -> Hardware:
        return here(Engine(devices="cpu:5", **settings), Launch(rank, 8, local_rank, 2, "a", 1))

    first, second = process(6, 0), process(7, 1)
    assert (first.names, second.names) == (("cpu:0", "cpu:1", "cpu:2"), ("cpu:0", "cpu:1"))
    assert (first.process, second.process) == ((6, 8), (7, 8))
    assert first.host == second.host == 61 * GIB
    limited = process(6, 0, host_limit=100 * GIB, optimizer_threads=9)
    assert limited.host == 50 * GIB and limited.machine.threads == 4
    assert process(6, 0, optimizer_threads=1).machine.threads == 1
    with pytest.raises(
        UserError, match='"cpu:1" names fewer devices than the 2 processes of this machine: start fewer'
    ):
        here(Engine(devices="cpu:1"), Launch(7, 8, 1, 2, "a", 1))


def test_groups_of_a_process_must_divide_its_devices(tmp_path):
    resolved = write_config(tmp_path, "engine.replicas=5", "engine.round_size=4", "train.global_batch_size=320")
    found = here(Engine(devices="cpu:8"), Launch(1, 2, 0, 1, "a", 1))
    with pytest.raises(
        UserError, match=r"2 processes share engine\.replicas = 5, and the 3 of this process do not divide"
    ):
        found.used(resolved.config)


def test_the_memory_that_locking_takes_is_not_free(monkeypatch):
    def free(gpus: int) -> int:
        found = tuple(Gpu(f"cuda:{index}", CONTEXT, GIB, "free", 2 * GIB) for index in range(gpus))
        monkeypatch.setattr(hardware, "gpu_memory", lambda names, limit: found)
        limits = here(Engine(devices="cpu:4"))
        assert limits.host == limits.host_most is not None
        assert here(Engine(devices="cpu:4", host_limit=700 * GIB)).host == 700 * GIB
        return limits.host

    monkeypatch.setattr(hardware, "program_bytes", lambda: GIB)
    monkeypatch.setattr(hardware, "available_bytes", lambda: 499 * GIB)
    assert free(0) == 500 * GIB
    assert free(4) * 1.0283 == pytest.approx(500 * GIB)
    assert free(4) < free(1) < 500 * GIB


@pytest.mark.parametrize(
    ("installed", "kilobytes"), [(64, 65_820_456), (128, 131_917_312), (256, 263_773_100), (512, 528_168_748)]
)
def test_a_planned_machine_has_what_one_that_is_sold_reports(monkeypatch, installed, kilobytes):
    """MemTotal of such machines; with a few hundred MiB in use."""
    gpus = tuple(Gpu(f"cuda:{index}", CONTEXT, GIB, "free", 2 * GIB) for index in range(4))
    monkeypatch.setattr(hardware, "gpu_memory", lambda names, limit: gpus)
    monkeypatch.setattr(hardware, "program_bytes", lambda: 0)
    monkeypatch.setattr(hardware, "available_bytes", lambda: kilobytes * 1024)
    sold, found = here(Engine(devices="cpu:4")).host, planned(CARD, 4, installed * GIB, Engine()).host
    assert sold is not None and found is not None and 0.995 * sold < found <= sold


def test_what_has_to_be_installed():
    for gpus in (1, 8):
        for needed in (1, 3 * GIB, 100 * GIB, 575 * GIB, 4000 * GIB):
            size = installed_for(needed, gpus)
            assert usable(size, gpus) >= needed and size % GIB == 0
            assert usable(size - max(GIB, size // 16), gpus) < needed


def test_modules_that_only_gpus_need_are_not_counted_for_workers_on_the_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "program_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(hardware, "LATER", {"this": 5, "sys": 7, "a_module_that_is_not_installed": 11})
    assert here(Engine(devices="cpu:1")).program == 3 * GIB + hardware.LATER_CPU
    assert hardware._growth(cuda=True) == 5


def test_a_planned_machine_has_what_the_config_names():
    assert planned(CARD, None, None, Engine(devices="cuda:0,2,3")).devices == 3
    assert planned(CARD, None, None, Engine()).devices == 1
    assert planned(CARD, 8, None, Engine(devices="cuda:0,2,3")).devices == 8


def test_the_memory_of_a_planned_gpu():
    found = planned(CARD, 2, 800 * GIB, Engine())
    assert [gpu.name for gpu in found.gpus] == ["cuda:0", "cuda:1"]
    assert found.tensor_bytes == CARD.vram - CONTEXT - MARGIN and found.gpus[0].limit == CARD.vram - MARGIN
    assert (found.host, found.host_source, found.host_most) == (usable(800 * GIB, 2), "--host", usable(800 * GIB, 2))
    limited = planned(CARD, 2, 800 * GIB, Engine(vram_limit=12 * GIB, host_limit=100 * GIB))
    assert limited.gpus[0].limit == 12 * GIB and limited.gpus[0].source == "engine.vram_limit"
    assert (limited.host, limited.host_source) == (100 * GIB, "engine.host_limit")
    assert planned(CARD, 1, None, Engine()).host is None
    with pytest.raises(UserError, match=r"engine\.vram_limit is 32\.0 GiB, but RTX 4090 has 24\.0 GiB"):
        planned(CARD, 1, None, Engine(vram_limit=32 * GIB))
    with pytest.raises(UserError, match=r"^engine\.vram_limit leaves nothing for tensors"):
        planned(CARD, 1, None, Engine(vram_limit=CONTEXT))
    with pytest.raises(UserError, match=r"^--vram leaves nothing .*: RTX 4090 has 100 MiB, and the CUDA context"):
        planned(replace(CARD, vram=100 << 20), 1, None, Engine(), vram_source="--vram")


def test_the_threads_of_a_planned_machine():
    assert planned(CARD, 1, None, Engine()).machine == Machine(CARD, 1)
    assert planned(CARD, 1, None, Engine(optimizer_threads=8)).machine.threads == 8


def test_what_sets_the_room_of_gpus(two_gpus):
    assert planned(CARD, 2, None, Engine()).tensor_source == CARD.name
    assert planned(CARD, 2, None, Engine(), vram_source="--vram").tensor_source == "--vram"
    limited = planned(CARD, 2, None, Engine(vram_limit=8 * GIB), vram_source="--vram")
    assert limited.tensor_source == "engine.vram_limit"
    assert planned(CARD, 2, None, Engine()).limited(Engine(vram_limit=8 * GIB)).tensor_source == "engine.vram_limit"
    both = replace(limited, gpus=gpu_memory(("cuda:0", "cuda:1"), 22 * GIB))
    assert both.tensor_source == "what is free on cuda:0 (other processes use 3.50 GiB)"
    assert both.names == ("cuda:0", "cuda:1") and here(Engine(devices="cpu:2")).names == ("cpu:0", "cpu:1")


def test_fewer_devices_and_other_limits():
    found = planned(CARD, 4, 800 * GIB, Engine(vram_limit=8 * GIB))
    assert found.first(2).devices == len(found.first(2).gpus) == 2
    assert found.first(9) == found
    raised = found.limited(Engine(vram_limit=23 * GIB, host_limit=900 * GIB))
    assert {gpu.limit for gpu in raised.gpus} == {23 * GIB} and raised.host == found.host_most
    unknown = replace(found, host=None, host_most=None)
    assert unknown.limited(Engine(host_limit=GIB)).host == GIB


def test_devices_that_replicas_use(tmp_path):
    def used(devices, *overrides):
        config = write_config(tmp_path, "train.micro_batch_size=16", *overrides).config  # four micro-batches per step
        return planned(CARD, devices, None, Engine()).used(config).devices

    assert [used(devices) for devices in (1, 3, 4, 8)] == [1, 3, 4, 4]
    assert [used(devices, "engine.replicas=2") for devices in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert used(8, "engine.replicas=2", "engine.round_size=1") == 2  # a group has a micro-batch at a time
    assert used(3, "engine.replicas=4") == 3
    with pytest.raises(
        UserError, match=r"replicas = 2 does not divide 3 GPUs: use 2 GPUs .*new run with engine.replicas = 1"
    ):
        used(3, "engine.replicas=2")


@pytest.fixture
def two_gpus(monkeypatch):
    free = {0: 20 * GIB, 1: 22 * GIB}
    monkeypatch.setattr("rptrain.engine.devices.cuda.context_bytes", lambda index: GIB // 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 24 * GIB))


def test_the_memory_of_gpus_that_are_here(two_gpus):
    names = ("cuda:0", "cuda:1")
    expected = Gpu("cuda:0", GIB // 2, 20 * GIB - MARGIN, "free", 20 * GIB + GIB // 2, 4 * GIB - GIB // 2)
    assert gpu_memory(names, None)[0] == expected
    assert [gpu.limit for gpu in gpu_memory(names, 8 * GIB)] == [8 * GIB, 8 * GIB]
    both = gpu_memory(names, 22 * GIB)
    assert [(gpu.tensor_bytes, gpu.source) for gpu in both] == [
        (20 * GIB, "free"),
        (22 * GIB - GIB // 2, "engine.vram_limit"),
    ]
    assert gpu_memory(("cpu:0",), 8 * GIB) == ()
    with pytest.raises(UserError, match=r"^engine\.vram_limit leaves nothing for tensors: cuda:0"):
        gpu_memory(names, GIB // 2)
    with pytest.raises(UserError, match=r"but cuda:0 has 24\.0 GiB"):
        gpu_memory(names, 25 * GIB)


@pytest.mark.parametrize(
    ("counted", "is_new", "context"),
    [(True, False, 400), (False, True, 400), (False, False, 512)],
    ids=["counted", "before-and-after", "unknown"],
)
def test_memory_of_other_processes_does_not_count_as_ours(monkeypatch, counted, is_new, context):
    """3 GiB that others use leave a limit of 4 GiB as it is. In a container the driver counts no process."""
    mib, free = 1 << 20, [21 * GIB]
    own = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=402 * mib), SimpleNamespace(pid=0, usedGpuMemory=3 * GIB)]

    def load(index):
        free[0] -= 402 * mib  # the context, and 2 MiB that torch's allocator keeps

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetMemoryInfo": lambda gpu, version: SimpleNamespace(free=free[0]),
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: own if counted else [],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr("rptrain.engine.devices.cuda._load_libraries", load)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: not is_new, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="8a1b"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2 * mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[0], 24 * GIB))
    (gpu,) = gpu_memory(("cuda:0",), 4 * GIB)
    assert (gpu.context, gpu.tensor_bytes, gpu.source) == (context * mib, 4 * GIB - context * mib, "engine.vram_limit")
    assert abs(gpu.others - 3 * GIB) < 128 * mib
    free[0] = 21 * GIB
    (gpu,) = gpu_memory(("cuda:0",), 23 * GIB)
    assert gpu.source == "free" and gpu.tensor_bytes == free[0]
    (warning,) = hardware._warnings(Engine(devices="cuda:0", vram_limit=23 * GIB), [gpu])
    assert re.fullmatch(
        r"engine\.vram_limit is 23\.0 GiB, but cuda:0 has 2\d\.\d GiB left \(other processes use [23]\.\d+ GiB\)",
        warning,
    )


def test_a_gpu_without_memory_for_a_context_is_a_mistake(monkeypatch):
    def full(index):
        raise torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr("rptrain.engine.devices.cuda.context_bytes", full)
    with pytest.raises(UserError, match=r"^cuda:1 failed: CUDA error: out of memory\.\n.*nvidia-smi"):
        gpu_memory(("cuda:1",), None)


def test_a_card_is_known_by_the_drivers_name():
    names = {
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "Quadro P400": None,
    }
    found = {name: card_named(name) for name in names}
    assert {name: card and card.name for name, card in found.items()} == names


@pytest.mark.parametrize(
    ("name", "capability", "peak"),
    [
        ("NVIDIA GeForce RTX 4080", (8, 9), Rates(76, 152, 152)),
        ("NVIDIA GeForce RTX 3080", (8, 6), Rates(76, 152)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), Rates(76, 76, 152)),
        ("NVIDIA A40", (8, 6), Rates(76, 76)),
    ],
)
def test_peaks_of_a_card_without_a_profile_are_guessed(name, capability, peak, monkeypatch):
    major, minor = capability
    found = SimpleNamespace(
        name=name, major=major, minor=minor, total_memory=16 * GIB, multi_processor_count=76, uuid="none"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    card = hardware.machine(["cuda:0"]).card
    assert (card.name, card.peak) == (name, peak)


@pytest.mark.parametrize(
    ("card", "settings", "half_sums"),
    [
        ("NVIDIA GeForce RTX 4090", {"dtype": "bfloat16", "fp8": True}, True),
        ("NVIDIA GeForce RTX 5070 Ti", {"dtype": "bfloat16", "fp8": True}, True),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", {"dtype": "float16", "fp16_accumulation": True}, True),
        ("NVIDIA GeForce RTX 3090", {"dtype": "float16", "fp16_accumulation": True}, True),
        ("NVIDIA GeForce RTX 4090", {"dtype": "bfloat16"}, False),
        ("NVIDIA GeForce RTX 4090", {"dtype": "float16"}, False),
        ("NVIDIA GeForce RTX 4090", {"dtype": "float32", "fp8": True}, False),
        ("NVIDIA L40S", {"dtype": "bfloat16", "fp8": True}, False),
        ("NVIDIA RTX 6000 Ada Generation", {"dtype": "bfloat16", "fp8": True}, False),
        ("NVIDIA H200", {"dtype": "float16", "fp16_accumulation": True}, False),
    ],
)
def test_geforce_cards_sum_in_float16(card, settings, half_sums):
    """By the driver's name, with its profile or without; the keys include it for 16-bit models."""
    found = card_named(card) or replace(CARD, name=card, peak=Rates(100, 100))
    spec = build(plain.CONFIG)
    engine = {key: value for key, value in settings.items() if key != "dtype"}
    config = SimpleNamespace(
        engine=SimpleNamespace(**{"fp8": False, "fp16_accumulation": False} | engine),
        model=SimpleNamespace(dtype=settings["dtype"]),
    )
    planned = for_hardware(spec, config, SimpleNamespace(machine=Machine(found, 1)))
    assert {layer.half_sums for layer in planned.stack} == {half_sums}
    assert half_sums or planned is spec


@pytest.fixture
def cards(monkeypatch):
    """Makes GPUs of some models be here, each with a little less memory than the one before."""

    def make(*models):
        found = {
            f"cuda:{index}": SimpleNamespace(name=name, major=major, minor=minor, total_memory=24 * GIB - index)
            for index, (name, major, minor) in enumerate(models)
        }
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)

    return make


def test_gpus_of_different_models_are_refused_before_their_memory_is_looked_at(cards, monkeypatch):
    cards(("RTX 3090", 8, 6), ("RTX 4090", 8, 9), ("RTX 4090", 8, 9))
    looked = []
    monkeypatch.setattr(hardware, "gpu_memory", lambda devices, limit: looked.append(devices) or 1 / 0)
    expected = (
        'engine.devices = "auto" names GPUs of different models, but a run needs GPUs of one model: '
        'set engine.devices = "cuda:1,2" (RTX 4090, compute capability 8.9) '
        'or engine.devices = "cuda:0" (RTX 3090, compute capability 8.6)'
    )
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        here(Engine())
    assert not looked
    with pytest.raises(ZeroDivisionError):
        here(Engine(devices="cuda:1,2"))
    assert looked == [("cuda:1", "cuda:2")]


def test_gpus_are_alike_by_model_and_capability(cards):
    cards(("H100", 9, 0), ("H100", 9, 0), ("H100", 9, 1))
    hardware.check_alike("cuda:0,1", ("cuda:0", "cuda:1"))  # sizes of memory are not compared
    hardware.check_alike("cpu:2", ("cpu:0", "cpu:1"))
    with pytest.raises(UserError, match=r'"cuda:1" \(H100, compute capability 9\.0\) or .* = "cuda:2" \(H100, .* 9\.1'):
        hardware.check_alike("cuda:1,2", ("cuda:1", "cuda:2"))


def test_fp8_needs_gpus_that_have_it(two_gpus, monkeypatch):
    monkeypatch.setattr(hardware, "resolve", lambda text: ("cuda:0", "cuda:1"))
    found = {f"cuda:{i}": SimpleNamespace(name="a GPU", major=8, minor=minor) for i, minor in enumerate((9, 6))}
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    with pytest.raises(UserError, match=r"8\.9 or more .*, and cuda:1 has 8\.6: remove engine\.fp8, or leave"):
        here(Engine(fp8=True))
    with pytest.raises(UserError, match=r"which the RTX 3090 lacks: remove engine\.fp8"):
        planned(CARDS["rtx3090"], 1, None, Engine(fp8=True))
    assert planned(CARD, 1, None, Engine(fp8=True)).devices == 1
