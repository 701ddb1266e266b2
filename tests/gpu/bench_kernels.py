"""Times every kernel beside other implementations of the same work; prints a table and writes JSON.

python -m tests.gpu.bench_kernels OUT.json [OP ...]: all of tests/gpu/kernels, or those named. Each implementation is
captured in a graph, so that launches cost nothing, and timed in turn with the others; the median counts. Bytes are set
against a copy of the same size, operations against a large matrix product, both timed in the same run.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

FLUSH = 256 << 20  # bytes written between two timings, more than any cache holds
REPEATS = 30


def recorded(work):
    """`work` as a graph, warmed up; what cannot be captured is called as it is."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    return graph.replay


def times(works):
    """Seconds of each, by the median of REPEATS turns with a cold cache."""
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    runs = {name: recorded(work) for name, work in works.items()}
    found = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) / 1e3)
    return {name: median(seconds) for name, seconds in found.items()}


def measured(case):
    works = {"ours": case.ours, **case.others}
    if case.nbytes:
        half = torch.empty(max(case.nbytes // 2, 1), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(half)
        works["copy"] = lambda: target.copy_(half)
    if case.flops:
        side = 8192
        a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        works["matmul"] = lambda: a @ b
    seconds = times(works)
    result = {"case": case.name, "seconds": seconds}
    if case.nbytes:
        result["of_copy"] = seconds.pop("copy") / seconds["ours"]
    if case.flops:
        rate = 2 * side**3 / seconds.pop("matmul")
        result["of_matmul"] = case.flops / rate / seconds["ours"]
    others = [value for name, value in seconds.items() if name != "ours"]
    if others:
        result["of_best_other"] = min(others) / seconds["ours"]
    return result


def main(out, operations):
    folder = Path(__file__).parent / "kernels"
    names = operations or sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "case"))
    results = []
    for name in names:
        torch.manual_seed(0)
        for case in importlib.import_module(f"tests.gpu.kernels.{name}").cases():
            result = measured(case)
            results.append(result)
            ratios = "  ".join(
                f"{key} {result[key]:.2f}" for key in ("of_copy", "of_matmul", "of_best_other") if key in result
            )
            each = "  ".join(f"{key} {value * 1e3:.3f}" for key, value in result["seconds"].items())
            print(f"{name}: {case.name}: {each} ms  {ratios}", flush=True)
        torch.cuda.empty_cache()
    commit = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "cases": results,
    }
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
