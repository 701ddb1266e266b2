"""Times every kernel beside other implementations of the same work; prints a table and writes JSON.

python -m benchmarks.kernels OUT.json [OP ...]: all files of this folder, or those named. Each implementation is
captured in a graph, so that launches cost nothing, and timed in turn with the others; the median counts. Bytes are set
against a copy of the same size, operations against a large matrix product, both timed in the same run.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
import torch.utils.deterministic

from benchmarks.commit import commit
from rptrain.bench import clock

DEVICE = torch.device("cuda")
TURNS = 30
RIVALS = ("compiled", "liger")


def measured(case):
    works = {"ours": case.ours, **case.others}
    if case.floor:
        works["floor"] = case.floor
    if case.nbytes:
        half = torch.empty(max(case.nbytes // 2, 1), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(half)
        works["copy"] = lambda: target.copy_(half)
    if case.flops:
        side = 8192
        a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        works["matmul"] = lambda: a @ b
    seconds = clock.seconds(works, DEVICE, turns=TURNS, cold=True)
    result = {"case": case.name, "seconds": seconds}
    if case.nbytes:
        result["of_copy"] = seconds.pop("copy") / seconds["ours"]
    if case.flops:
        rate = 2 * side**3 / seconds.pop("matmul")
        result["of_matmul"] = case.flops / rate / seconds["ours"]
    if case.floor:
        result["of_floor"] = seconds.pop("floor") / seconds["ours"]
    others = [value for name, value in seconds.items() if name != "ours"]
    if others:
        result["of_best_other"] = min(others) / seconds["ours"]
    return result


def main(out, operations):
    torch.use_deterministic_algorithms(True)  # as in training
    torch.utils.deterministic.fill_uninitialized_memory = False
    folder = Path(__file__).parent
    names = operations or sorted(p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "__main__", "case"))
    results = []
    for name in names:
        torch.manual_seed(0)
        for case in importlib.import_module(f"benchmarks.kernels.{name}").cases():
            result = measured(case)
            results.append(result)
            ratios = "  ".join(
                f"{key} {result[key]:.2f}"
                for key in ("of_copy", "of_matmul", "of_floor", "of_best_other")
                if key in result
            )
            each = "  ".join(f"{key} {value * 1e3:.3f}" for key, value in result["seconds"].items())
            print(f"{name}: {case.name}: {each} ms  {ratios}", flush=True)
            torch.cuda.empty_cache()
    rivals = [
        (r["seconds"]["ours"], min(r["seconds"][n] for n in RIVALS if n in r["seconds"]))
        for r in results
        if any(n in r["seconds"] for n in RIVALS)
    ]
    ours, theirs = (sum(column) for column in zip(*rivals, strict=True)) if rivals else (0.0, 0.0)
    print(f"in all: ours {ours * 1e3:.2f} ms, the better of {' and '.join(RIVALS)} {theirs * 1e3:.2f} ms")
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "sums": {"ours": ours, "better of compiled and liger": theirs},
        "cases": results,
    }
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
