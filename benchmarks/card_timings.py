"""Per-layer times of the paper's five models on a card by its profile, for `benchmarks/bubble.py`.

python -m benchmarks.card_timings rtx4090 OUT.json

They are estimates, not measurements: the operations and bytes of each layer over the rates that kernels of such cards
reach (`rptrain/schedule/machine.py`). Micro-batches of 4 x 2,048 tokens, bfloat16. A model's last layer is the head.
Sizes are in bytes; a GiB of the card's memory is left to the CUDA context and to libraries.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from rptrain.engine.memory.step_layout import StepLayout
from rptrain.models.families import registry
from rptrain.models.locate import locate, read_config
from rptrain.planner.choose import layer_costs
from rptrain.schedule.machine import CARDS, GIB, Machine

MODELS = {
    "qwen3-1.7b": "full",
    "llama-3.1-8b": "full",
    "gpt-oss-20b": "full",
    "qwen3-32b": "full",
    "qwen3-235b-a22b": "lora",
}
WORKLOAD = StepLayout(
    sequences=4, length=2048, micro_batches=16, round_size=16, dtype=torch.bfloat16, asynchronous=True
)


def frozen_times(spec, card):
    """Forward, and backward with recompute, of layers whose own weights get no gradients; adapters not counted."""
    times = []
    for layer in spec.stack:
        forward, backward = layer.work(WORKLOAD.tokens, WORKLOAD.length, WORKLOAD.dtype.itemsize)
        inputs = replace(backward, matmul=backward.matmul / 2, grouped=backward.grouped / 2)
        ahead = card.seconds(forward)
        times.append((ahead, ahead + card.seconds(inputs)))
    return times


def timings(name):
    card, models = CARDS[name], {}
    for model, method in MODELS.items():
        spec = registry.build(read_config(locate(model)))
        if method == "full":
            costs = layer_costs(spec, WORKLOAD, Machine(card, 8), None)
            times = [(cost.forward, cost.backward) for cost in costs]
        else:
            times = frozen_times(spec, card)
        itemsize = WORKLOAD.dtype.itemsize
        models[model] = {
            "method": method,
            "layers": [[float(f"{t:.6g}") for t in pair] for pair in times],
            "weights": [itemsize * sum(spec.units[unit].numel for unit in layer.units) for layer in spec.stack],
            "kept": [layer.kept_bytes(WORKLOAD.tokens, itemsize) for layer in spec.stack],
            "workspace": max(layer.workspace_bytes(WORKLOAD.tokens, itemsize) for layer in spec.stack),
            "boundary": itemsize * WORKLOAD.tokens * spec.hidden_size,
        }
    return {"note": __doc__.split("\n\n")[2], "card": card.name, "memory": card.vram - GIB, "models": models}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(timings(sys.argv[1]), indent=1) + "\n")
