"""The paper's bubble experiment (section 5.6.1): schedules simulated with estimated layer times, on 8 GPUs.

python -m benchmarks.bubble [OUT_DIR] writes bubble.json, bubble.md and bubble.svg from timings-rtx4090.json in
benchmarks/results.
"""

import json
import sys
from html import escape
from pathlib import Path

from rptrain.schedule.baselines import LOOPED, ONCE, best
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import dispatch
from rptrain.schedule.estimate import Setting
from rptrain.schedule.partition import partition
from rptrain.schedule.plan import Plan
from rptrain.schedule.search import search
from rptrain.schedule.simulate import simulate

DEVICES, MICRO_BATCHES = 8, 16
ROUNDS = (1, 2)
WARM_UP, STEPS = 4 * DEVICES, 8 * DEVICES  # of async: before its steps are alike, and measured
RESULTS = Path(__file__).parent / "results"
TIMINGS = RESULTS / "timings-rtx4090.json"

HEADS = {"kept": False, "recomputed": True}  # whether the other schedules recompute the head
PAPERS, SHORTEST, LEAST_IDLE = range(3)  # how stages are found
OURS = {  # lag, how stages are found, whether memory is limited
    "sync, paper's objective": (0, PAPERS, False),
    "sync, searched": (0, SHORTEST, False),
    "async, paper's objective": (1, PAPERS, False),
    "async, searched": (1, SHORTEST, False),
}
MORE = {
    "sync, least idle": (0, LEAST_IDLE, False),
    "async, least idle": (1, LEAST_IDLE, False),
    "sync, searched, in memory": (0, SHORTEST, True),
    "async, searched, in memory": (1, SHORTEST, True),
}
COLORS = {
    "GPipe": "#8c96a0", "1F1B": "#b3a37e", "Interleaved 1F1B": "#d3a271", "Looped BFS": "#c98682",
    "sync, paper's objective": "#a3c6e6", "sync, searched": "#6f9fd0",
    "async, paper's objective": "#a6d3b0", "async, searched": "#62a877",
}  # fmt: skip
INK = "#6e7781"  # reads on light and on dark backgrounds


def other_schedules(costs, recompute_head):
    """The best that each can do: with any number of stages per device and either way to cut the layers."""
    found = best(costs, DEVICES, MICRO_BATCHES, recompute_head=recompute_head)
    return {
        name: {"bubble": run.bubble, "seconds": run.seconds, "loops": run.loops, "cut": run.cut}
        for name, run in found.items()
    }


def within(model, memory):
    """Whether stages fit a GPU together: two slots of weights, float32 sums of gradients and those rounded, what the
    recomputed forward keeps, temporaries and rings.
    """
    full = 3 if model["method"] == "full" else 0

    def fits(stages):
        weights = max(sum(model["weights"][i] for i in stage.layers) for stage in stages)
        backward = [stage for stage in stages if stage.backward]
        grads = full * max((sum(model["weights"][i] for i in stage.layers) for stage in backward), default=0)
        kept = max(sum(model["kept"][i] for i in stage.layers) if stage.backward else 0 for stage in stages)
        return 2 * weights + grads + kept + model["workspace"] + 8 * model["boundary"] <= memory

    return fits


def roundpipe(costs, lag, aim, fits):
    """The best plan of those with one and with two rounds."""
    runs = []
    by = {"by": lambda found: found.bubble} if aim == LEAST_IDLE else {}
    for rounds in ROUNDS:
        size = MICRO_BATCHES // rounds
        if aim != PAPERS:
            stages = search(costs, Setting(DEVICES, MICRO_BATCHES, size, lag), fits, **by).stages
        else:
            stages = partition(costs, DEVICES, MICRO_BATCHES, lambda stage: fits([stage]))
        plan = Plan(stages, DEVICES, MICRO_BATCHES, size)
        if lag:
            timeline = simulate(dispatch(plan, costs, lag=1, iterations=WARM_UP + STEPS))
            window = WARM_UP - 1, WARM_UP + STEPS - 1
            bubble, seconds = timeline.steady_bubble(*window), timeline.period(*window)
        else:
            timeline = simulate(dispatch(plan, costs))
            bubble, seconds = timeline.bubble(), timeline.makespan
        bubble = round(bubble, 9) + 0.0  # none is 0, not -0
        runs.append({"bubble": bubble, "seconds": seconds, "stages": len(stages), "plan": str(plan), "rounds": rounds})
    return min(runs, key=lambda run: (run["bubble" if aim == LEAST_IDLE else "seconds"], run["rounds"]))


def experiment(timings):
    models = {}
    for name, model in timings["models"].items():
        costs = [LayerCost(forward, backward) for forward, backward in model["layers"]]
        others = {head: other_schedules(costs, recompute) for head, recompute in HEADS.items()}
        limits = {False: lambda stages: True, True: within(model, timings["memory"])}
        plans = {
            which: roundpipe(costs, lag, aim, limits[limited]) for which, (lag, aim, limited) in (OURS | MORE).items()
        }
        ours, more = ({which: plans[which] for which in group} for group in (OURS, MORE))
        best = {head: min(run["bubble"] for run in runs.values()) for head, runs in others.items()}
        reductions = {
            which: {head: 1 - ours[which]["bubble"] / best[head] for head in HEADS} for which in list(OURS)[:2]
        }
        models[name] = {
            "method": model["method"],
            "others": others,
            "roundpipe": ours,
            "more": more,
            "reductions": reductions,
        }
    return {
        "timings": {"note": timings["note"], "card": timings["card"]},
        "devices": DEVICES,
        "micro_batches": MICRO_BATCHES,
        "models": models,
    }


def table(header, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def markdown(result):
    """The tables, and the plans that they are of."""
    names = (*ONCE, *LOOPED)
    header = ["model", *names, *(f"RoundPipe {which}" for which in OURS)]
    bubbles, seconds, reductions, more = [], [], [], []
    for model, found in result["models"].items():
        bubble_row, seconds_row = [model], [model]
        for name in names:
            runs = [found["others"][head][name] for head in HEADS]
            loops = f" (v {' / '.join(str(run['loops']) for run in runs)})" if name in LOOPED else ""
            bubble_row.append(" / ".join(f"{run['bubble']:.1%}" for run in runs) + loops)
            seconds_row.append(" / ".join(f"{run['seconds']:.3f}" for run in runs))
        for which in OURS:
            run = found["roundpipe"][which]
            bubble_row.append(f"{run['bubble']:.1%} (S {run['stages']}, R {run['rounds']})")
            seconds_row.append(f"{run['seconds']:.3f}")
        runs = found["more"].values()
        more.append(
            [model, *(f"{r['bubble']:.1%}, {r['seconds']:.3f} s (S {r['stages']}, R {r['rounds']})" for r in runs)]
        )
        bubbles.append(bubble_row)
        seconds.append(seconds_row)
        reductions.append([model, *(f"{share[head]:.0%}" for share in found["reductions"].values() for head in HEADS)])
    reduced = [f"{which}, head {head}" for which in list(OURS)[:2] for head in HEADS]
    return f"""# Bubbles of pipeline schedules

{DEVICES} GPUs, {MICRO_BATCHES} micro-batches of 4 × 2,048 tokens (paper section 5.6.1). Transfers and the optimizer
take no time, and memory is not limited.

Layer times of an {result["timings"]["card"]}. {result["timings"]["note"].strip()}

Written by `python -m benchmarks.bubble`. Each schedule is taken with what makes its step shortest: the others with v
stages a GPU and the better of two ways to cut the layers, RoundPipe with S stages in R rounds. Layers are recomputed in
backward. Of two figures for another schedule, the first is without recomputing the head, which none of them needs to,
and the second with it; RoundPipe computes the head once, forward and backward. Sync is one step from start to end, as
are the other schedules; async is the mean of {STEPS} steps after {WARM_UP}.

## Share of time in which GPUs are idle

{table(header, bubbles)}

## Less idle time in sync than in the best other schedule

{table(["model", *reduced], reductions)}

## Seconds a step

A bubble is a share: a schedule that computes less can idle more and still be faster.

{table(header, seconds)}

## Other plans of RoundPipe

Searched for the least idle time instead of the shortest step; and with stages that fit the card's memory together,
which the plans above need not, as in the paper's simulation. The plans themselves are in bubble.json.

{table(["model", *MORE], more)}
"""


def svg(result):
    """A group of bars a model. A line across a bar of another schedule: its bubble with the head recomputed."""
    names, models = list(COLORS), result["models"]
    bar, space, left, top, height = 17, 24, 52, 84, 260
    group = bar * len(names) + space
    width = left + group * len(models) + 16
    most = max(
        run["bubble"]
        for found in models.values()
        for runs in (*found["others"].values(), found["roundpipe"])
        for run in runs.values()
    )
    limit = max(-(-most // 0.1) * 0.1, 0.1)

    def level(share):
        return top + height * (1 - share / limit)

    parts = [f'<text x="{left}" y="22" font-size="15">Idle share of 8 GPUs, 16 micro-batches</text>']
    for i, name in enumerate(names):
        x, y = left + (0, 222, 372, 594)[i % 4], 34 + i // 4 * 17
        label = name if i < 4 else f"RoundPipe {name}"
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLORS[name]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y + 9}">{escape(label)}</text>')
    for step in range(round(limit * 10) + 1):
        y = level(step / 10)
        parts.append(f'<path d="M{left} {y:.1f}H{width - 16}" stroke="{INK}" stroke-width="0.6" opacity="0.5"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{step * 10} %</text>')
    for g, (model, found) in enumerate(models.items()):
        start = left + group * g + space / 2
        for i, name in enumerate(names):
            x = start + bar * i
            run = found["roundpipe"][name] if name in OURS else found["others"]["kept"][name]
            share, middle = max(run["bubble"], 0.0), x + bar / 2 - 0.5
            parts.append(f"<g><title>{escape(model)}, {escape(name)}: {share:.2%}</title>")
            parts.append(
                f'<rect x="{x}" y="{level(share):.1f}" width="{bar - 1}" height="{top + height - level(share):.1f}" '
                f'fill="{COLORS[name]}"/></g>'
            )
            above = share
            if name not in OURS:
                again = found["others"]["recomputed"][name]["bubble"]
                above = max(share, again)
                parts.append(f'<path d="M{x} {level(again):.1f}h{bar - 1}" stroke="{INK}" stroke-width="1.6"/>')
            parts.append(
                f'<text x="{middle}" y="{level(above) - 3:.1f}" text-anchor="middle" font-size="7">'
                f"{share * 100:.1f}</text>"
            )
        parts.append(
            f'<text x="{start + bar * len(names) / 2}" y="{top + height + 18}" text-anchor="middle">'
            f"{escape(model)}</text>"
        )
    foot = "Line on a bar: the same with the head recomputed. Figures are those of the bars, in %."
    parts.append(f'<text x="{left}" y="{top + height + 38}">{foot}</text>')
    size = f'width="{width}" height="{top + height + 48}" viewBox="0 0 {width} {top + height + 48}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="11" '
        f'fill="{INK}">\n{body}\n</svg>\n'
    )


def main(out=RESULTS / "bubble", timings=TIMINGS):
    result = experiment(json.loads(timings.read_text()))
    out.mkdir(parents=True, exist_ok=True)
    (out / "bubble.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "bubble.md").write_text(markdown(result))
    (out / "bubble.svg").write_text(svg(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
