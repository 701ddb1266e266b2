"""Plans for the paper's machine, eight RTX 4090 GPUs, for each type of products, beside the paper's measured speeds.

python -m benchmarks.paper_plans [OUT.json, benchmarks/results/paper-plans.json] writes the plans and prints a table for
docs/benchmarks/plans.md. All speeds but the paper's are estimates of the planner at the assumed share of the card's
peak; the paper measured float16 with float16 sums at 2,048 tokens per sequence. "FP8" includes float16 sums in
attention and the head, which these cards take with engine.fp8; "FP8 blocks alone" leaves them out. `device_seconds`
says what the GPUs compute in a step: seconds by kind of work, of all GPUs together.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rptrain.config.resolve import resolve
from rptrain.machine.flags import MachineFlags
from rptrain.planner.choose import layer_work, step_layout
from rptrain.planner.report import PlanReport, report
from rptrain.schedule.machine import CARDS

FOLDER = Path(__file__).parent
CONFIG = FOLDER / "qwen3-1.7b.toml"
MACHINE = MachineFlags(gpus=8, card="rtx4090")
CARD = CARDS["rtx4090"]
WITHOUT_HALF = replace(MACHINE, tflops_fp16=CARD.rates.bf16 / CARD.shares.fp16)  # as if float16 sums gained nothing


@dataclass(frozen=True)
class Model:
    """A run of the paper: its preset, global batch size, measured tokens per second, and other settings."""

    name: str
    preset: str
    sequences: int
    paper: float
    overrides: tuple[str, ...] = ()


MODELS = (
    Model("Qwen3-1.7B", "qwen3-1.7b", 512, 65417),
    Model("Llama-3.1-8B", "llama-3.1-8b", 256, 24275),
    Model("GPT-OSS-20B", "gpt-oss-20b", 128, 18122),
    Model("Qwen3-32B", "qwen3-32b", 128, 5516),
    Model("Qwen3-235B, LoRA (r = 32)", "qwen3-235b-a22b", 64, 1820, ("train.method=lora", "lora.r=32")),
)
TYPES = {  # by name: the machine, and the settings that choose them
    "bfloat16": (MACHINE, ()),
    "float16 sums": (MACHINE, ("model.dtype=float16", "engine.fp16_accumulation=true")),
    "FP8 blocks alone": (WITHOUT_HALF, ("engine.fp8=true",)),
    "FP8": (MACHINE, ("engine.fp8=true",)),
}


def main(models: Sequence[Model], types: Mapping[str, tuple[MachineFlags, Sequence[str]]], out: Path) -> None:
    plans = {}
    for model in models:
        plans[model.name] = {"sequences": model.sequences, "paper": model.paper, "types": {}}
        for name, (flags, settings) in types.items():
            found = _plan(model, flags, settings)
            values = _values(found)
            values["relative"] = values["tokens_per_second"] / model.paper
            plans[model.name]["types"][name] = values
            print(f"{model.name}, {name}: {values['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)
            source = found.hardware.machine.card.rates_source
    machine = {"gpus": MACHINE.gpus, "card": MACHINE.card, "rates": source}
    out.write_text(json.dumps({"machine": machine, "plans": plans}, indent=1) + "\n")
    print(table(plans, list(types)))


def _plan(model: Model, flags: MachineFlags, settings: Sequence[str]) -> PlanReport:
    """The plan with the fastest micro-batch size. Raises UserError if a setting is not possible."""
    given = (f"model.path={model.preset}", f"train.global_batch_size={model.sequences}", *model.overrides, *settings)
    found = report(resolve(CONFIG, ("engine.devices=auto", "train.micro_batch_size=auto", *given)), flags)
    assert found.run is not None, found.problem
    return found


def _values(found: PlanReport) -> dict[str, Any]:
    run, verdict = found.run, found.verdict
    assert run is not None and verdict is not None
    return {
        "tokens_per_second": found.config.tokens / run.estimate.period,
        "seconds_per_step": run.estimate.period,
        "bubble": run.estimate.bubble,
        "update_seconds": sum(cost.update for cost in run.costs),
        "limit": verdict.limit,
        "micro_batch_size": found.config.train.sequences,
        "plan": str(run.plan),
        "device_seconds": device_seconds(found),
    }


def device_seconds(found: PlanReport) -> dict[str, float]:
    """Seconds of a step's computation by kind of work, of all devices together."""
    assert found.run is not None
    plan, card, spec = found.run.plan, found.hardware.machine.card, found.spec
    layout = step_layout(found.config, card)
    computed = [stage for stage in plan.stages if stage.kind == "F"]
    taken: dict[str, float] = {}
    for index, layer in enumerate(spec.stack):
        forward, backward = layer_work(spec, layer, layout)
        passes = [forward] * (1 + sum(index in stage.layers for stage in computed))  # once more in backward
        for work in (*passes, backward):
            for kind, seconds in card.times(work).items():
                taken[kind] = taken.get(kind, 0.0) + plan.micro_batches * seconds
    return taken


def table(plans: Mapping[str, Any], types: Sequence[str]) -> str:
    """Tokens per second, and in parentheses the ratio to the paper's, as Markdown."""
    lines = [f"| tokens/s, estimated | {' | '.join(types)} | the paper, measured |", "| --- " * (len(types) + 2) + "|"]
    for name, model in plans.items():
        cells = [f"{t['tokens_per_second']:,.0f} ({t['relative']:.2f})" for t in model["types"].values()]
        lines.append(f"| {name}, {model['sequences']} sequences | {' | '.join(cells)} | {model['paper']:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:2]]
    main(MODELS, TYPES, *(given or [FOLDER / "results" / "paper-plans.json"]))
