"""The bubble experiment on made-up times: its figures are those of the simulations that it names."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks import bubble
from rptrain.schedule.baselines import evenly, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import dispatch
from rptrain.schedule.partition import partition, split
from rptrain.schedule.plan import Plan
from rptrain.schedule.simulate import simulate
from rptrain.schedule.validate import validate

pytestmark = pytest.mark.long

LAYERS = {"even": [[1.0, 3.0]] * 15 + [[1.0, 4.0]], "wide": [[1.0, 3.1]] * 21 + [[4.0, 12.4]]}
MEMORY = 14  # weights of two, their gradients, what two keep, and one for the rest: 2 * 2 + 3 * 2 + 2 + 1 is 13
SCHEDULES = {
    "GPipe": [gpipe],
    "1F1B": [one_f_one_b],
    "Interleaved 1F1B": [lambda *a, v=v, **k: interleaved_1f1b(*a, v, **k) for v in (1, 2)],
    "Looped BFS": [lambda *a, v=v, **k: looped_bfs(*a, v, **k) for v in (1, 2)],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bubble")
    sizes = {"workspace": 1, "boundary": 0}
    models = {
        name: {"method": "full", "layers": layers, "weights": [1] * len(layers), "kept": [1] * len(layers)} | sizes
        for name, layers in LAYERS.items()
    }
    (folder / "timings.json").write_text(
        json.dumps({"note": "made up", "card": "a card", "memory": MEMORY, "models": models})
    )
    bubble.main(folder / "out", folder / "timings.json")
    return folder / "out"


def costs_of(model):
    return [LayerCost(forward, backward) for forward, backward in LAYERS[model]]


def tables(written):
    """Rows by the heading of their table and their model: cells by the column's name."""
    found = {}
    for section in (written / "bubble.md").read_text().split("\n## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
        for row in lines[2:]:
            found[section.splitlines()[0], row[0]] = dict(zip(lines[0], row, strict=True))
    return found


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_other_schedules_are_the_best_of_their_kind(written, model, schedule):
    shown = tables(written)["Share of time in which GPUs are idle", model][schedule]
    best = [
        min(
            simulate(make(costs_of(model), 8, 16, recompute_head=recompute, cut=cut)).bubble()
            for make in SCHEDULES[schedule]
            for cut in (split, evenly)
        )
        for recompute in (False, True)
    ]
    assert shown.split(" (")[0] == " / ".join(f"{share:.1%}" for share in best)


def test_equal_stages_show_the_closed_forms(written):
    row = tables(written)["Share of time in which GPUs are idle", "even"]
    assert row["GPipe"].startswith(f"{7 / 23:.1%} / ")
    assert row["Looped BFS"].startswith(f"{56 / (16 * 16 + 56):.1%} / ")
    assert row["Looped BFS"].endswith("(v 2 / 2)")


@pytest.mark.parametrize("model", LAYERS)
def test_the_figures_of_roundpipe_are_those_of_the_plans_that_are_named(written, model):
    found = tables(written)
    shown, seconds = (found[title, model] for title in ("Share of time in which GPUs are idle", "Seconds a step"))
    plans = json.loads((written / "bubble.json").read_text())["models"][model]["roundpipe"]
    costs = costs_of(model)
    for which, run in plans.items():
        plan = Plan.parse(run["plan"])
        validate(plan, len(costs))
        if "paper" in which:
            assert plan.stages == partition(costs, 8, 16)
        if which.startswith("async"):
            timeline = simulate(dispatch(plan, costs, lag=1, iterations=120))
            step, share = timeline.period(39, 119), timeline.steady_bubble(39, 119)
        else:
            timeline = simulate(dispatch(plan, costs))
            step, share = timeline.makespan, timeline.bubble()
        cell = shown[f"RoundPipe {which}"]
        assert float(cell.split("%")[0]) == pytest.approx(share * 100, abs=0.11)
        assert cell.endswith(f"(S {len(plan.stages)}, R {plan.rounds})")
        assert float(seconds[f"RoundPipe {which}"]) == pytest.approx(step, rel=2e-3)
        other = Plan(plan.stages, 8, 16, 24 - plan.round_size)  # with the number of rounds that was not taken
        if which == "sync, paper's objective":
            assert step <= simulate(dispatch(other, costs)).makespan
    step = {which: run["seconds"] for which, run in plans.items()}
    assert step["sync, searched"] <= step["sync, paper's objective"] * (1 + 1e-5)
    assert step["async, searched"] <= step["async, paper's objective"] * (1 + 1e-3)
    assert step["async, searched"] < step["sync, searched"]


@pytest.mark.parametrize("model", LAYERS)
def test_plans_that_fit_memory_and_plans_that_idle_least(written, model):
    found = json.loads((written / "bubble.json").read_text())["models"][model]
    row = tables(written)["Other plans of RoundPipe", model]
    for which, run in found["more"].items():
        plan = Plan.parse(run["plan"])
        validate(plan, len(LAYERS[model]))
        assert row[which].startswith(f"{run['bubble']:.1%}, {run['seconds']:.3f} s")
        if "memory" in which:
            longest = max(len(stage.layers) for stage in plan.stages)
            back = max(len(stage.layers) for stage in plan.stages if stage.backward)
            assert 2 * longest + 4 * back + 1 <= MEMORY
    assert max(len(stage.layers) for stage in Plan.parse(found["roundpipe"]["async, searched"]["plan"]).stages) > 4
    for update in ("sync", "async"):
        assert found["more"][f"{update}, least idle"]["bubble"] <= found["roundpipe"][f"{update}, searched"]["bubble"]


@pytest.mark.parametrize("model", LAYERS)
def test_reductions_are_against_the_best_other_schedule(written, model):
    found = json.loads((written / "bubble.json").read_text())["models"][model]
    row = tables(written)["Less idle time in sync than in the best other schedule", model]
    for head in ("kept", "recomputed"):
        best = min(run["bubble"] for run in found["others"][head].values())
        for which in ("sync, paper's objective", "sync, searched"):
            assert row[f"{which}, head {head}"] == f"{1 - found['roundpipe'][which]['bubble'] / best:.0%}"


def test_a_bar_a_schedule(written):
    drawing = ElementTree.parse(written / "bubble.svg").getroot()
    found = json.loads((written / "bubble.json").read_text())["models"]
    titles = [title.text for title in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 8 * len(LAYERS)
    assert f"wide, GPipe: {found['wide']['others']['kept']['GPipe']['bubble']:.2%}" in titles
