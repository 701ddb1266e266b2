"""`rptrain plan --nodes N --network RATE`: the plan of a node, and the speed of all."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rptrain.cli.commands import app
from rptrain.config.resolve import resolve
from rptrain.machine.hardware import planned
from rptrain.models.families import registry
from rptrain.models.locate import locate, read_config
from rptrain.planner.memory import plan_run
from rptrain.schedule.machine import CARDS, GOODPUT

CONFIG = """\
[model]
path = "qwen3-1.7b"
[[data.train]]
path = "rows-that-are-not-there.jsonl"
[data]
max_length = 2048
[train]
micro_batch_size = 4
global_batch_size = 128
[engine]
replicas = 4
"""
PARAMETERS, VOCAB, HIDDEN = 1_720_574_976, 151_936, 2_048  # tied embeddings
SERVER = ["--gpus", "2", "--card", "rtx4090", "--host", "256GiB"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(CONFIG)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--config", "c.toml", *arguments], env={"COLUMNS": "100"})


def as_json(*arguments: str) -> dict:
    result = run("--json", *SERVER, *arguments)
    assert result.exit_code in (0, 2), result.output
    return json.loads(result.stdout)


def test_a_slow_network_is_the_limit():
    """4 bytes per parameter and 4 per value of a row for gradients, 2 for weights; 3 of 4 nodes are others."""
    found = as_json("--nodes", "4", "--network", "1GbE")
    scaling = found["scaling"]
    rows = min(32 // 4 * 4 * 2048, VOCAB) * HIDDEN
    assert scaling["gradient_bytes"] == pytest.approx(0.75 * 4 * (PARAMETERS + rows), rel=0.01)
    assert scaling["weight_bytes"] == pytest.approx(0.75 * 2 * PARAMETERS, rel=1e-6)
    seconds = (scaling["gradient_bytes"] + scaling["weight_bytes"]) / (GOODPUT * 125e6)
    assert scaling["exchange_seconds"] == pytest.approx(seconds)
    assert found["plan"]["seconds_per_step"] == pytest.approx(seconds, rel=0.05)
    assert scaling["limits"] and found["roofline"]["limit"] == "network"
    assert [plan["nodes"] for plan in scaling["plans"]] == [1, 2, 4]
    assert scaling["plans"][-1]["seconds_per_step"] == pytest.approx(found["plan"]["seconds_per_step"], rel=0.01)
    assert found["plan"]["tokens_per_second"] == pytest.approx(128 * 2048 / found["plan"]["seconds_per_step"])
    text = " ".join(run(*SERVER, "--nodes", "4", "--network", "1GbE").stdout.split())
    for part in (
        "On 2 × RTX 4090 of each of 4 hypothetical machines",
        "Nodes (estimated)",
        "of weights per step",
        "at 1GbE.",
        "The network is the limit: a step takes",
        "times as long as with an infinitely fast network. To hide the exchange, it needs at least",
    ):
        assert part in text


def test_a_fast_network_hides_and_the_plan_names_the_slowest_that_does():
    fast = as_json("--nodes", "2", "--network", "100GbE")["scaling"]
    assert not fast["limits"] and 0.9 < fast["plans"][1]["efficiency"] <= 1.05
    assert fast["hiding_rate"] < 12.5e9
    for factor, limits in ((0.9, True), (1.1, False)):
        rate = f"{factor * fast['hiding_rate'] / 1e6:.0f}MB/s"
        assert as_json("--nodes", "2", "--network", rate)["scaling"]["limits"] is limits
    text = " ".join(run(*SERVER, "--nodes", "2", "--network", "100GbE").stdout.split())
    assert "Computation hides the exchange: it makes a step" in text


@pytest.mark.parametrize(("update", "each"), [("async", 8), ("sync", 6)])
def test_the_memory_is_that_of_a_node(update, each):
    """Weights and gradients are whole in each node, optimizer state and the rest of the float32 weights are divided."""
    names = ("weights", "gradients, summed", "optimizer state", "rest of the float32")
    for nodes in (2, 4):
        replicas = f"engine.replicas={nodes}"  # one for each
        found = as_json("--nodes", str(nodes), "--network", "10GbE", f"optim.update={update}", replicas)
        parts = found["memory"][0]["parts"]
        states = sum(part["nbytes"] for part in parts if part["name"].startswith(names))
        assert states == pytest.approx((each + 10 / nodes) * PARAMETERS, rel=0.001)
        assert found["scaling"]["plans"][-1]["host_bytes"] == found["memory"][0]["total"]


def test_a_node_updates_its_part():
    config, spec = resolve("c.toml").config, registry.build(read_config(locate("qwen3-1.7b")))
    hardware = planned(CARDS["rtx4090"], 1, None, config.engine)
    alone, part = (plan_run(config, spec, replace(hardware, process=process))[0] for process in ((0, 1), (3, 4)))
    assert sum(cost.update for cost in part.costs) == pytest.approx(sum(cost.update for cost in alone.costs) / 4)
    assert not any(cost.reduce or cost.gather for cost in (*alone.costs, *part.costs)), "without a network"


def test_adapters_are_all_that_is_exchanged():
    scaling = as_json("--nodes", "4", "--network", "1GbE", "train.method=lora")["scaling"]
    assert 0 < scaling["gradient_bytes"] == 2 * scaling["weight_bytes"] < 0.02 * PARAMETERS


def test_replicas_for_all_nodes_are_needed_and_found():
    result = run(*SERVER, "--nodes", "4", "--network", "10GbE", "engine.replicas=2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "engine.replicas = 2, but 4 processes need at least one replica each" in result.stderr
    found = as_json("--nodes", "4", "--network", "10GbE", "engine.replicas=auto")
    assert found["step"]["replicas"] in (4, 8)


def test_a_number_of_nodes_without_a_plan_is_shown():
    """Two nodes of three groups each cannot divide two GPUs."""
    uneven = ["--nodes", "3", "--network", "10GbE", "engine.replicas=6", "train.global_batch_size=96"]
    plans = as_json(*uneven, "--gpus", "4")["scaling"]["plans"]
    assert [plan["nodes"] for plan in plans] == [1, 2, 3]
    assert plans[1]["seconds_per_step"] is None and "do not divide" in plans[1]["problem"]
    assert re.search(r"\n +2 +no plan +– +– +–", run(*SERVER, "--gpus", "4", *uneven).stdout)


def test_flags_are_checked_before_the_config():
    result = run("--nodes", "0", "train.sed=3")
    assert (result.exit_code, result.stdout) == (2, "") and "--nodes must be from 1" in result.stderr
