"""Measures training speed and memory of a preset with random weights and tokens; prints and writes JSON.

python -m tests.gpu.measure OUT.json [key=value ...]: overrides of the config below, and `steps`, `warmup`.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import psutil
import torch

from rptrain.config_source import resolve
from rptrain.engine.engine import Engine, Optimizer
from rptrain.engine.memory import ModelStore
from rptrain.job import prepare_job

CONFIG = """
[model]
path = "qwen3-1.7b"
init = "random"
[[data.train]]
path = "builtin:random"
[data]
max_length = 2048
[train]
micro_batch_size = 4
global_batch_size = 64
max_steps = 1000
[optim]
learning_rate = 1e-5
[engine]
devices = "cuda:0"
vram_limit = "24GiB"
host_limit = "110GiB"
"""


class Sampler(threading.Thread):
    """The most memory the driver counts on each GPU, context included, and the process's resident memory."""

    def __init__(self, devices):
        super().__init__(daemon=True)
        self.indices = [int(name.partition(":")[2]) for name in devices]
        self.free = {i: torch.cuda.mem_get_info(i)[1] for i in self.indices}
        self.stop = threading.Event()

    def run(self):
        while not self.stop.wait(0.02):
            for i in self.indices:
                self.free[i] = min(self.free[i], torch.cuda.mem_get_info(i)[0])

    def peaks(self):
        return [torch.cuda.mem_get_info(i)[1] - self.free[i] for i in self.indices]


def fill(store):
    """Weights of the usual size; equal units share their numbers, which makes it quick."""
    torch.manual_seed(0)
    seen = {}
    for state in store.units:
        for param in state.unit.params:
            view = state.views[state.current][param.name]
            if param.std is None:
                view.fill_(1)
            elif (key := (param.name, param.shape)) in seen:
                view.copy_(seen[key])
            else:
                seen[key] = view.copy_(torch.randn(param.shape, dtype=torch.float32) * param.std)
    store.loaded()


def measure(overrides, steps, warmup):
    path = Path("/tmp/measure.toml")
    path.write_text(CONFIG)
    config = resolve(path, overrides).config
    began = time.perf_counter()
    job = prepare_job(config)
    sampler = Sampler(job.devices)
    sampler.start()
    with ModelStore(
        job.spec, job.dtype, generations=1 + job.asynchronous, wide_grad=job.plan.plan.rounds > 1, lock=True
    ) as store:
        fill(store)
        optimizer = Optimizer(asynchronous=job.asynchronous, max_grad_norm=1.0)
        engine = Engine(
            store,
            job.plan.plan,
            job.devices,
            optimizer,
            tokens=config.train.micro_batch_size * config.data.max_length,
            device_limit=job.device_limit,
            trace=config.engine.trace,
        )
        loaded = time.perf_counter()
        with engine:
            losses, times, allocations = [], [], []
            previous = None
            for step in range(warmup + steps + 1):  # the last has no successor beside it: not timed
                batch = job.batches.batch(step)
                loss, update = engine.forward_backward(batch), engine.step(1e-5)
                if previous is not None:
                    losses.append(previous[0].result())
                    previous[1].result()
                    times.append(time.perf_counter())
                    allocations.append(torch.cuda.memory_stats(job.devices[0])["num_device_alloc"])
                previous = loss, update
            losses.append(previous[0].result())
            engine.synchronize()
            times.append(time.perf_counter())
            if engine.trace is not None:
                report_trace(engine.trace.take(warmup), times[warmup - 1])
        memory = psutil.Process().memory_full_info()
        seconds = (times[-2] - times[warmup - 1]) / steps
        result = {
            "overrides": overrides,
            "plan": str(job.plan.plan),
            "devices": list(job.devices),
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "parameters": job.spec.num_parameters,
            "seconds_per_step": seconds,
            "tokens_per_second": batch.tokens / seconds,
            "first_step_after_seconds": times[0] - began,
            "loading_seconds": loaded - began,
            "vram_peak_gib": [round(peak / 2**30, 3) for peak in sampler.peaks()],
            "vram_planned_gib": round(job.plan.device.total / 2**30, 3),
            "allocator_peak_gib": [round(torch.cuda.max_memory_reserved(name) / 2**30, 3) for name in job.devices],
            "driver_allocations": allocations,
            "state_bytes_per_parameter": round(job.plan.store_bytes / job.spec.num_parameters, 3),
            "activations_gib": round(job.plan.boundary_bytes / 2**30, 3),
            "process_pss_gib": round(getattr(memory, "pss", memory.rss) / 2**30, 3),
            "locked": store.locked,
            "losses": losses,
        }
        sampler.stop.set()
        sampler.join()
    return result


def report_trace(spans, origin):
    for device in sorted({s.slot.device for s in spans}):
        lane = [s for s in spans if s.slot.device == device]
        busy = sum(s.end() - s.start() for s in lane)
        total = max(s.end() for s in lane) - min(s.start() for s in lane)
        print(f"device {device}: busy {busy:.3f} of {total:.3f} s")
        for slot in dict.fromkeys(s.slot for s in lane):
            own = [s for s in lane if s.slot == slot]
            first, last = own[0].start() - origin, own[-1].end() - origin
            each = sum(s.end() - s.start() for s in own) / len(own)
            print(f"  {slot}: {first:.3f} to {last:.3f}, {each * 1e3:.1f} ms a micro-batch")


if __name__ == "__main__":
    given = [a for a in sys.argv[2:] if not a.startswith(("steps=", "warmup="))]
    counts = dict(a.split("=") for a in sys.argv[2:] if a.startswith(("steps=", "warmup=")))
    outcome = measure(given, int(counts.get("steps", 5)), int(counts.get("warmup", 3)))
    commit = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
    outcome["commit"] = commit.stdout.strip() or "unknown"
    Path(sys.argv[1]).write_text(json.dumps(outcome, indent=1))
    print(json.dumps({k: v for k, v in outcome.items() if k not in ("losses", "driver_allocations")}, indent=1))
