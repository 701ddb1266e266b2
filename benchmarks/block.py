"""A decoder block against its floor: forward, recomputed forward and backward, 8,192 tokens, and its launches.

python -m benchmarks.block OUT.json [PRESET ...]: by default Qwen3-1.7B's block and Llama-3.1-8B's, in bfloat16 and with
products in FP8, in turn. `whole` does all that the floor counts. `last` is the last block of a backward stage, whose
recomputed output nobody takes.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.commit import commit
from benchmarks.kernels.attention import micro_batch
from rptrain.bench import clock
from rptrain.bench.floor import floor
from rptrain.engine.memory.step_layout import accumulate_dtype
from rptrain.engine.reproducible import Reproducible
from rptrain.models.families import registry
from rptrain.models.layers.rope import RotaryTables
from rptrain.models.locate import locate, read_config
from rptrain.models.transforms.fp8 import with_fp8

ROWS, LENGTH = 4, 2048
TOKENS = ROWS * LENGTH
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
STEP = 64  # sequences


def block(spec):
    """Forward of the first block, and backward, as the last of a backward stage and as one before."""
    layer, unit = spec.layers[0], spec.units[spec.layers[0].units[0]]
    flat = torch.empty(unit.numel, dtype=DTYPE, device=DEVICE).normal_(std=0.02)
    params = unit.views(flat)
    for param in unit.in_fp8:
        buffer = torch.empty(param.fp8_bytes(columns=True), dtype=torch.uint8, device=DEVICE)
        weight = param.fp8_view(buffer, columns=True)
        weight.write(params[param.name])
        params[param.name] = weight
    grads = unit.views(torch.zeros(unit.numel, dtype=accumulate_dtype(DTYPE), device=DEVICE))
    mb = micro_batch([[LENGTH]] * ROWS)
    mb = replace(mb, rotations=RotaryTables(spec.rotaries, torch.float32, DEVICE).at(mb.positions))
    x, dy = (torch.randn(TOKENS, spec.hidden_size, device=DEVICE, dtype=DTYPE) for _ in range(2))

    def forward():
        return layer.forward(params, x, mb)

    def backward():
        return layer.backward(params, grads, layer.recompute(params, x, mb), dy, mb)

    def inner_backward():
        y, saved = layer.forward_saved(params, x, mb)
        return y, layer.backward(params, grads, saved, dy, mb)

    return forward, backward, inner_backward


def launches(run):
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    kernels = [event for event in record.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    table = {event.key[:90]: (event.count, event.self_device_time_total) for event in kernels}
    return sum(count for count, _ in table.values()), table


def measure(preset):
    """The block in bfloat16 and with its products in FP8, in turn."""
    spec = registry.build(read_config(locate(preset)))
    specs = {"bf16": spec, "fp8": with_fp8(spec)}
    floors = {kind: floor(each, ROWS, LENGTH, DTYPE, DEVICE) for kind, each in specs.items()}
    works = {}
    for kind, each in specs.items():
        forward, backward, inner_backward = block(each)
        works |= {
            (kind, "last"): in_a_row(forward, backward),
            (kind, "whole"): in_a_row(forward, inner_backward),
            (kind, "forward"): forward,
            (kind, "recompute and backward"): backward,
        }
    times = clock.seconds(works, DEVICE, turns=30, cold=False)
    result = {"preset": preset, "fp8_over_bf16": times["bf16", "whole"] / times["fp8", "whole"]}
    for kind, whole in floors.items():
        count, table = launches(works[kind, "whole"])
        result[kind] = {
            "copy_bytes_per_second": whole.copy,
            "floor": {layer.name: [vars(line) for line in layer.lines] for layer in whole.layers},
            "floor_block_seconds": whole.layers[0].seconds(),
            "floor_tokens_per_second": whole.tokens_per_second(),
            "floor_tokens_per_second_without_recompute": whole.tokens_per_second(recompute=False),
            "seconds": {name: taken for (each, name), taken in times.items() if each == kind},
            "of_floor": whole.layers[0].seconds() / times[kind, "whole"],
            "launches": count,
            "kernels": table,
        }
        show(preset, kind, whole, result[kind])
    print(f"{preset}: FP8 {result['fp8_over_bf16']:.3f} times as fast as bfloat16")
    return result


def in_a_row(*works):
    def run():
        for work in works:
            work()

    return run


def show(preset, kind, whole, result):
    for layer in whole.layers:
        print(f"{preset} {kind} {layer.name} x {layer.count}: {layer.seconds() * 1e3:.3f} ms")
        for line in layer.lines:
            print(f"    {line.operation:40} {line.forward * 1e3:8.3f} {line.backward * 1e3:8.3f}")
    print(f"  floor {result['floor_block_seconds'] * 1e3:.3f} ms, {whole.tokens_per_second():.0f} tokens/s;", end=" ")
    print({name: round(taken * 1e3, 3) for name, taken in result["seconds"].items()})
    print(f"  of floor {result['of_floor']}, {result['launches']} launches")
    for key, (number, taken) in sorted(result["kernels"].items(), key=lambda item: -item[1][1]):
        print(f"      {number:3} {taken:8.1f} us  {key}")


def main(out, presets):
    Reproducible(cuda=True)
    results = [measure(preset) for preset in presets or ("qwen3-1.7b", "llama-3.1-8b")]
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "blocks": results,
    }
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
