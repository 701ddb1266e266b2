"""Plans of seven models on machines with RTX 4090 GPUs, whose advice is typed in. Nothing is measured.

    python -m benchmarks.advice [OUT.json, benchmarks/results/advice.json]

There is one process per model. A config that does not fit ends with advice. Each of its lines is given to a new plan as
it stands, overrides and flags; an AssertionError names the first one that does not fit. Prints a table for
docs/benchmarks/plans.md.

    python -m benchmarks.advice --random CONFIGS [SEED, 0]

does the same for random configs and machines, and prints what was refused before there was a plan.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.commit import commit
from rptrain.config.resolve import resolve
from rptrain.machine.flags import MachineFlags
from rptrain.models.locate import locate, read_config
from rptrain.planner.network import Nodes
from rptrain.planner.report import PlanReport, report
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import cores

RESULTS = Path(__file__).parent / "results"
CONFIG = '[model]\npath = "qwen3-1.7b"\n[[data.train]]\npath = "builtin:random"\n[train]\nmax_steps = 10\n'
STEP = ("train.micro_batch_size=4", "train.global_batch_size=64", "data.max_length=2048")


@dataclass(frozen=True)
class Model:
    """A preset, and what its config.json has otherwise."""

    name: str
    preset: str
    config: dict[str, int] = field(default_factory=dict)


MODELS = (
    Model("Llama-3.1-8B", "llama-3.1-8b"),
    Model("Phi-4 (14B)", "phi-4"),
    Model("Qwen3-32B", "qwen3-32b"),
    Model(
        "Llama-3.1-70B",
        "llama-3.1-8b",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    Model("GPT-OSS-20B", "gpt-oss-20b"),
    Model(
        "Qwen3-30B-A3B",
        "qwen3-235b-a22b",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
        },
    ),
    Model("Qwen3-235B-A22B", "qwen3-235b-a22b"),
)
DRAWN = ("qwen3-1.7b", "llama-3.1-8b", "gpt-oss-20b", "smollm3-3b")  # random configs
SMALL_HOSTS, SMALL_GPUS = ("8GiB", "16GiB", "32GiB", "64GiB", "128GiB"), ("8GiB", "6GiB")
GPUS, HOSTS = (1, 4, 8), ("64GiB", "128GiB", "256GiB", "512GiB")


def typed(line: str, flags: MachineFlags) -> tuple[tuple[str, ...], MachineFlags]:
    """The overrides and the machine of a line of advice, which begins with "- "."""
    words = line.removeprefix("- ").partition(" (")[0].split()
    sizes = {flag: words[words.index(f"--{flag}") + 1] for flag in ("host", "vram") if f"--{flag}" in words}
    return tuple(word for word in words if "=" in word), replace(flags, **sizes)


def checked(given: Sequence[str], flags: MachineFlags, nodes: Nodes | None = None) -> tuple[PlanReport, dict[str, Any]]:
    """The plan, and for each line of its advice the tokens per second once it is typed in.

    Raises AssertionError if the plan does not fit and no line makes it fit, or if a line does not.
    """
    found = report(resolve(Path("advice.toml"), given, CONFIG), flags, nodes=nodes)
    lines = {}
    for line in (line for line in str(found.advice).splitlines() if line.startswith("- ")):
        overrides, machine = typed(line, flags)
        after = report(resolve(Path("advice.toml"), (*given, *overrides), CONFIG), machine, nodes=nodes)
        assert after.fits, f"{given} on {flags}: {line} does not fit: {after.problem or after.memory}"
        assert after.run is not None
        lines[line.removeprefix("- ").partition(" (")[0]] = after.config.tokens / after.run.estimate.period
    assert found.fits or lines, f"{given} on {flags}: no advice"
    return found, lines


def main(models: Sequence[Model], gpus: Sequence[int], hosts: Sequence[str], out: Path) -> None:
    forked = get_context("fork")  # a spawned process would not find this module, as the root is not on the path
    with ProcessPoolExecutor(min(len(models), cores()), forked) as pool:
        plans = [plan for found in pool.map(plans_of, models, repeat(gpus), repeat(hosts)) for plan in found]
    out.write_text(json.dumps({"commit": commit(), "overrides": STEP, "plans": plans}, indent=1) + "\n")
    print("\n".join(table(plans)))


def plans_of(model: Model, gpus: Sequence[int], hosts: Sequence[str]) -> list[dict[str, Any]]:
    """The plans of a model, with the speed of what its advice says."""
    plans = []
    with TemporaryDirectory() as folder:
        config = read_config(locate(model.preset)) | model.config
        Path(folder, "config.json").write_text(json.dumps(config))
        for count, host in product(gpus, hosts):
            found, lines = checked((f"model.path={folder}", *STEP), MachineFlags(gpus=count, card="rtx4090", host=host))
            speed = found.config.tokens / found.run.estimate.period if found.run else None
            plan = {"model": model.name, "gpus": count, "host": host, "fits": found.fits}
            plans.append({**plan, "tokens_per_second": speed, "advice": lines})
            print(f"{model.name}, {count} GPUs, {host}: {len(lines)} lines of advice", file=sys.stderr, flush=True)
    return plans


def table(plans: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: what the first line of the advice changes, and its speed."""
    hosts = list(dict.fromkeys(plan["host"] for plan in plans))
    yield f"| model | GPUs | {' | '.join(hosts)} |"
    yield "| --- " * (len(hosts) + 2) + "|"
    for model, count in dict.fromkeys((plan["model"], plan["gpus"]) for plan in plans):
        cells = [_cell(plan) for plan in plans if (plan["model"], plan["gpus"]) == (model, count)]
        yield f"| {model} | {count} | {' | '.join(cells)} |"


def _cell(plan: dict[str, Any]) -> str:
    if plan["fits"]:
        return f"fits: {plan['tokens_per_second']:,.0f}"
    line, speed = next(iter(plan["advice"].items()))
    short = re.sub(r"\b(train|optim|lora|engine|model|data)\.", "", line)
    return f"{short}: {speed:,.0f}"


def sweep(count: int, seed: int) -> None:
    """Checks random configs on random machines."""
    random, counts, refused = Random(seed), Counter[str](), Counter[str]()
    for _ in range(count):
        given, flags, nodes = draw(random)
        try:
            found, _ = checked(given, flags, nodes)
        except UserError as error:
            counts["refused"] += 1
            refused[re.sub(r"\d+", "N", str(error))] += 1
            continue
        counts["fits" if found.fits else "advice" if found.advice.remedies else "memory to buy"] += 1
    print(json.dumps({"seed": seed, "configs": dict(counts), "refused": dict(refused)}, indent=1))


def draw(
    random: Random, models: Sequence[str] = DRAWN, hosts: Sequence[str] = SMALL_HOSTS, vrams: Sequence[str] = SMALL_GPUS
) -> tuple[tuple[str, ...], MachineFlags, Nodes | None]:
    """A config, a machine and a number of machines. Some cannot go together."""

    def one(*values: Any) -> Any:
        return random.choice(values)

    batch = one(1, 3, 8, 16, 60, 64, 256)
    given = {
        "model.path": one(*models),
        "data.max_length": one(512, 2000, 2048, 8192, 131072),
        "train.global_batch_size": batch,
        "train.micro_batch_size": one("auto", *(n for n in (1, 2, 3, 4, 16) if batch % n == 0)),
        "engine.round_size": one(None, None, "auto", 1, 2, 4),
        "engine.replicas": one(1, 1, 1, 2, 4, "auto"),
        "optim.moments": one("fp32", "fp32", "bf16", "int8"),
        "optim.update": one("async", "sync"),
        "model.dtype": one("bfloat16", "bfloat16", "bfloat16", "float16", "float32"),
        "engine.host_limit": one(None, None, None, hosts[0]),
        "engine.vram_limit": one(None, None, None, vrams[-1]),
        "train.method": one(None, None, "lora"),
    }
    if given["train.method"]:
        given["lora.base"] = one(None, "nf4", "int8")
        given["model.hold"] = one(None, None, None if given["lora.base"] else "map")
    flags = MachineFlags(one(1, 2, 3, 4, 8), one("rtx4090", "rtx3090"), one(None, *vrams), None, one(*hosts))
    nodes = one(None, None, None, Nodes.of(2, "10GbE"))
    return tuple(f"{key}={value}" for key, value in given.items() if value is not None), flags, nodes


if __name__ == "__main__":
    if sys.argv[1:2] == ["--random"]:
        sweep(int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    else:
        main(MODELS, GPUS, HOSTS, Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "advice.json")
