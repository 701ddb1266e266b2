"""Which passes a stage makes over its layers, in which order, with which parameters."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from rptrain.engine import stage_pass
from rptrain.engine.stage_pass import StagePass, StageTensors, StageWeights
from rptrain.schedule.plan import Stage


@dataclass
class Layer:
    """Adds its parameter on the way forward, subtracts it on the way back."""

    name: str
    log: list

    def forward(self, p, x, mb):
        self.log.append(f"{self.name} forward")
        return x + p["w"]

    def forward_saved(self, p, x, mb):
        self.log.append(f"{self.name} forward_saved")
        return x + p["w"], x

    def recompute(self, p, x, mb):
        self.log.append(f"{self.name} recompute")
        return x

    def backward(self, p, g, saved, dy, mb):
        self.log.append(f"{self.name} backward of {saved.item():g}")
        return dy - p["w"]

    def loss_backward(self, p, g, x, mb, scale):
        self.log.append(f"{self.name} loss of {x.item():g}")
        return x.sum(), x * scale


def make(stage, outputs=(), dy=None, log=None, count=3):
    log = [] if log is None else log
    spec = SimpleNamespace(layers=[Layer(f"l{i}", log) for i in range(count)], head=Layer("head", log))
    layers = Stage.parse(stage)
    params = [{"w": torch.tensor([10.0**i])} for i in layers.layers]
    written = {boundary: torch.full((1,), torch.nan) for boundary in outputs}
    described = lambda: log.append("mb")  # noqa: E731
    weights, tensors = StageWeights(params, params), StageTensors(torch.zeros(1), dy, written)
    return StagePass(spec, layers, described, weights, tensors, lambda kind, index: nullcontext()), written


def run(stage, outputs, dy=None, *, by_layer=False):
    log, loss = [], torch.full((), -1.0)
    work, written = make(stage, outputs, dy, log)
    for steps in work.pieces(by_layer=by_layer):
        work.run(steps, 2.0, loss)
    return log, {boundary: value.item() for boundary, value in written.items()}, loss.item()


def test_forward_writes_the_boundaries_that_are_asked_for():
    log, written, _ = run("F0-2", (1, 3))
    assert log == ["mb", "l0 forward", "l1 forward", "l2 forward"]
    assert written == {1: 1, 3: 111}


def test_the_last_layer_of_a_backward_stage_recomputes_no_output():
    log, written, _ = run("B1-2", (1,), dy=torch.tensor([1000.0]))
    assert log == ["mb", "l1 forward_saved", "l2 recompute", "l2 backward of 10", "l1 backward of 0"]
    assert written == {1: 1000 - 100 - 10}


@pytest.mark.parametrize(("stage", "seen"), [("FB1-3", ["l1", "l2"]), ("FB3-3", [])])
def test_a_fused_stage_goes_through_the_head_and_back(stage, seen):
    log, written, loss = run(stage, (3 - len(seen),))
    total = 110 if seen else 0
    assert log[: 1 + len(seen)] == ["mb", *(f"{name} forward_saved" for name in seen)]
    assert log[1 + len(seen)] == f"head loss of {total}" and loss == total
    assert [entry.split()[0] for entry in log[2 + len(seen) :]] == seen[::-1]
    assert written == {3 - len(seen): 2 * total - total}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("stage", "dy"), [("F0-2", None), ("FB1-3", None), ("FB3-3", None), ("B0-2", 7.0)])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_pieces_compute_what_the_whole_pass_does(stage, dy, steps, monkeypatch):
    parsed = Stage.parse(stage)
    outputs = (parsed.start,) if parsed.backward else (parsed.stop,)
    gradient = None if dy is None else torch.tensor([dy])
    whole = run(stage, outputs, gradient)
    monkeypatch.setattr(stage_pass, "PIECE_STEPS", steps)
    assert run(stage, outputs, gradient) == whole
    assert run(stage, outputs, gradient, by_layer=True) == whole


def lengths(stage, **options):
    pieces = make(stage, count=28)[0].pieces(**options)
    assert [i for steps in pieces for i in steps] == list(range(pieces[-1].stop))
    return [len(steps) for steps in pieces]


def test_pieces_have_about_the_same_number_of_steps():
    assert lengths("F0-2") == [3]
    assert lengths("F0-8") == [4, 5]
    assert lengths("B0-3") == [8]
    assert lengths("FB28-28") == [1]
    assert lengths("FB0-28") == [7, 7, 7, 7, 7, 7, 7, 8]


def test_by_layer_each_layer_is_a_piece_forward():
    assert lengths("F0-2", by_layer=True) == [1, 1, 1]
    assert lengths("B0-9", by_layer=True) == [1] * 10 + [5, 5]
    assert lengths("FB28-28", by_layer=True) == [1]
