"""Times tiles of the attention kernels on this GPU: what the tables in kernels/flash_tiles.py are made from.

python -m benchmarks.sweep_attention [OUT.json] [--wide]. Everything is compiled first, in as many processes as there
are processors; then each kernel is timed with each of its tiles at two models' heads (--wide: at heads of 512 columns)
and three layouts of documents. Its result is compared with FlashAttention-2's, for heads of 512 with the reference's.
What does not launch, or is wrong, is named and left out. The last lines are the tiles whose times, relative to the best
of each case, have the least product.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import exp, fsum, log
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks import ROOT
from benchmarks.kernels.attention import LAYOUTS, SHAPES, forward_flops, inputs, micro_batch, pair
from rptrain.kernels import flash, target
from rptrain.kernels.attention import attention, attention_backward
from rptrain.kernels.flash import Tiles

LAUNCHES, REPEATS = 10, 7  # in a graph, and of the graph
ALLOWED = 2e-2  # of the largest value, from another implementation
CANDIDATES = {
    "forward": [
        (128, 128, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 32, 8, 4),
        (128, 64, 4, 2),
        (64, 128, 4, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 32, 4, 3),
    ],
    "dq": [
        (128, 128, 8, 1),
        (128, 128, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 32, 8, 3),
        (64, 128, 4, 1),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 32, 4, 3),
    ],
    "dkdv": [
        (128, 128, 8, 1),
        (64, 128, 8, 2),
        (64, 128, 8, 3),
        (32, 128, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 8, 2),
        (64, 64, 4, 1),
        (64, 64, 4, 2),
        (32, 64, 4, 2),
        (32, 64, 4, 3),
    ],
}
WIDE_SHAPES = {"heads of 512": (16, 4, 512)}
WIDE_CANDIDATES = {
    "forward": [
        (64, 64, 8, 1),
        (64, 32, 8, 1),
        (64, 32, 8, 2),
        (64, 16, 8, 1),
        (64, 16, 8, 2),
        (32, 32, 8, 1),
        (32, 32, 4, 1),
        (32, 16, 4, 1),
    ],
    "dq": [
        (64, 32, 8, 1),
        (64, 16, 8, 1),
        (32, 32, 8, 1),
        (32, 16, 8, 1),
        (32, 16, 8, 2),
        (16, 32, 8, 1),
        (16, 32, 4, 1),
        (16, 16, 4, 1),
    ],
    "dkdv": [
        (64, 32, 8, 1),
        (64, 16, 8, 1),
        (32, 32, 8, 1),
        (32, 16, 8, 1),
        (32, 16, 8, 2),
        (16, 32, 8, 1),
        (16, 16, 8, 1),
        (16, 16, 4, 1),
    ],
}


@dataclass(frozen=True)
class Choice:
    kernel: str
    tiles: Tiles
    tma: bool

    def __str__(self) -> str:
        return f"{self.kernel} {tuple(self.tiles)}{' tma' if self.tma else ''}"


def choices(candidates: dict[str, list[tuple[int, int, int, int]]]) -> list[Choice]:
    ways = (True, False) if target.read().tma else (False,)
    return [Choice(kernel, Tiles(*tiles), tma) for kernel, each in candidates.items() for tiles in each for tma in ways]


class Setting:
    """One model's heads over one layout, with what another implementation computes there."""

    def __init__(self, model: str, layout: str):
        self.mb = micro_batch(LAYOUTS[layout])
        self.q, self.k, self.v, self.dout = inputs(*(SHAPES | WIDE_SHAPES)[model])
        other = "reference" if model in WIDE_SHAPES else "flash"
        self.out, saved = attention(self.q, self.k, self.v, self.mb, other)
        lse = saved.lse.T if other == "reference" else saved.lse
        self.lse = lse.reshape(self.q.shape[1], -1).contiguous()
        inner = (self.q, self.k, self.v, self.out, saved, self.mb)
        self.grads = attention_backward(self.dout, *inner)
        delta = (self.dout.float() * self.out.float()).sum(-1).T.contiguous()
        ends = torch.searchsorted(self.mb.cu_seqlens, torch.arange(len(self.q), device="cuda"), right=True)
        self.prepared = delta, self.mb.cu_seqlens[ends].int()

    def work(self, choice: Choice):
        """What a launch does, where it writes, and what should stand there."""
        passes = flash.Passes(choice.tiles, choice.tiles, choice.tiles, choice.tma)
        mb, args = self.mb, (self.q, self.k, self.v, self.dout, self.lse)
        if choice.kernel == "forward":
            written: list[Tensor] = []

            def forward() -> None:
                written[:] = flash.forward_triton(*args[:3], mb.positions, mb.length, passes=passes)

            return forward, written, (self.out, self.lse)
        if choice.kernel == "dq":
            dq = torch.empty_like(self.q)
            rest = (self.out, mb.positions, mb.cu_seqlens, mb.length, None, None, None, passes)
            return lambda: flash.dq_triton(dq, *args, *rest), [dq], self.grads[:1]
        dk, dv = torch.empty_like(self.k), torch.empty(self.v.shape, dtype=self.v.dtype, device="cuda")
        rest = (*self.prepared, mb.length, passes)
        return lambda: flash.dkdv_triton(dk, dv, *args, *rest), [dk, dv], self.grads[1:]

    def wrong(self, choice: Choice) -> str | None:
        """Why a choice is out: the error of its launch, or of its result."""
        from triton.errors import TritonError

        try:
            launch, written, expected = self.work(choice)
            launch()
        except (TritonError, RuntimeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        for ours, theirs in zip(written, expected, strict=True):
            error = ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()
            if not error <= ALLOWED:
                return f"off by {error:.3g} of the largest value"
        return None


def seconds(work) -> float:
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    graph.replay()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / LAUNCHES)
    return median(found)


def compile_all(job: tuple[str, list[Choice]]) -> None:
    """Leaves the programs in Triton's cache; what fails here fails again, and is reported, when it is timed."""
    model, some = job
    setting = Setting(model, "4 x 2048")
    for choice in some:
        setting.wrong(choice)


def others(setting: Setting) -> str:
    if setting.q.shape[-1] > 256:
        return "the framework has no kernels for such heads"
    found = []
    for force in ("flash", "cudnn") if setting.mb.uniform else ("flash",):
        works = pair(force, setting.q, setting.k, setting.v, setting.dout, setting.mb)
        forward, backward = (seconds(work) * 1e3 for work in works)
        found.append(f"{force} {forward:.3f} forward, {backward:.3f} backward")
    return "; ".join(found)


def main(out: str | None, wide: bool) -> None:
    shapes, candidates = (WIDE_SHAPES, WIDE_CANDIDATES) if wide else (SHAPES, CANDIDATES)
    workers = min(16, os.cpu_count() or 1)
    every = choices(candidates)
    jobs = [(model, every[i::workers]) for i in range(workers) for model in shapes]
    sys.path.insert(0, str(ROOT))  # spawned processes import this program
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_all, jobs))
    sys.path.remove(str(ROOT))
    print("compiled", flush=True)

    times: dict[Choice, dict[str, float]] = {choice: {} for choice in every}
    for model in shapes:
        for layout in LAYOUTS:
            setting = Setting(model, layout)
            name = f"{model}, {layout}"
            print(f"{name}: {others(setting)}", flush=True)
            for choice in every:
                if choice not in times:
                    continue
                reason = setting.wrong(choice)
                if reason is not None:
                    print(f"  left out: {choice}: {reason}", flush=True)
                    del times[choice]
                    continue
                times[choice][name] = seconds(setting.work(choice)[0])
            heads, _, size = shapes[model]
            flops = forward_flops(LAYOUTS[layout], heads, size)
            for kernel in candidates:
                ranked = sorted((t[name], str(c)) for c, t in times.items() if c.kernel == kernel)
                rate = flops * {"forward": 1.0, "dq": 1.5, "dkdv": 2.0}[kernel] / ranked[0][0] / 1e12
                best = "; ".join(f"{choice} {time * 1e3:.3f} ms" for time, choice in ranked[:4])
                print(f"  {best} ({rate:.0f} TFLOP/s)", flush=True)

    for kernel in candidates:
        left = {choice: found for choice, found in times.items() if choice.kernel == kernel}
        names = next(iter(left.values())).keys()
        least = {name: min(found[name] for found in left.values()) for name in names}
        scores = {c: exp(fsum(log(found[n] / least[n]) for n in names) / len(names)) for c, found in left.items()}
        ranked = sorted(scores.items(), key=lambda item: item[1])
        print(f"best {kernel}: " + "; ".join(f"{choice} {score:.3f}" for choice, score in ranked[:5]), flush=True)
    if out is not None:
        report = {str(choice): found for choice, found in times.items()}
        Path(out).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "seconds": report}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", nargs="?")
    parser.add_argument("--wide", action="store_true", help="heads of 512 columns")
    given = parser.parse_args()
    main(given.out, given.wide)
