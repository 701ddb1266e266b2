"""`rptrain bench` on a GPU: memory as the driver and as the allocator count it, the floor, and a steady state."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from rptrain.bench import clock, run
from rptrain.config.resolve import resolve

from .. import run_tools as tools

pytestmark = pytest.mark.gpu

CONFIG = """\
[model]
path = "tiny-tasks"
[[data.train]]
path = "builtin:random"
[data]
max_length = 128
[train]
micro_batch_size = 4
global_batch_size = 32
[engine]
devices = "cuda:0"
vram_limit = "4GiB"
"""


def test_the_floor_gives_back_what_it_took(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    job = run._prepare(resolve(tmp_path / "run.toml"))
    before = torch.cuda.memory_allocated()
    assert run._floor(job, print).tokens_per_second() > 0
    assert torch.cuda.memory_allocated() <= before


def test_a_gpu_is_measured(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    result = tools.invoke("bench", "--config", tmp_path / "run.toml", "--json", "--floor", "--warmup", "4")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (gpu,) = found["memory"]["gpus"]
    assert 0 < gpu["allocator_peak"] < gpu["peak"] and gpu["allocator_planned"] < gpu["planned"]
    assert gpu["limit"] == 4 << 30 and gpu["driver_allocations"] == 0
    (device,) = found["devices"]
    assert device["busy"] + sum(device["idle"].values()) == pytest.approx(1, abs=1e-9) and device["busy"] > 0
    assert found["memory"]["host"]["locked"]
    assert 0 < found["floor"]["achieved"] < 1


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_work_is_timed_on_each_gpu() -> None:
    for index in range(torch.cuda.device_count()):
        counter = torch.zeros((), device=f"cuda:{index}")
        with warnings.catch_warnings(action="error"):
            clock.seconds({"": lambda counter=counter: counter.add_(1)}, counter.device, turns=4, cold=True)
        assert counter.item() == 3 + 1 + 4, "before the capture, in the first turn, and in the others"
