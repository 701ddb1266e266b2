"""The panel of memory: names in whole words, and what was measured."""

from pathlib import Path

import pytest

from rptrain.runs.view.run_view import RunView
from rptrain.tui.run.memory_panel import MemoryPanel, shortened

from .recorded import make_run


@pytest.mark.parametrize(
    ("name", "room", "shown"),
    [
        ("  weights, 2 generations", 26, "  weights, 2 generations"),
        ("  weights, 2 generations", 18, "  weights ×2"),
        ("  weights in FP8 for the devices, 2 generations", 18, "  FP8 weights ×2"),
        ("  weights in FP8 for the devices", 18, "  FP8 weights"),
        ("  weights, two generations", 18, "  weights"),
        ("  gradients, summed over rounds", 18, "  gradients"),
        ("  activations between stages", 18, "  activations"),
        ("  the program and its libraries", 18, "  program"),
        ("  frozen weights, matrices in nf4", 18, "  frozen weights"),
        ("  optimizer state", 18, "  optimizer state"),
        ("  memory of 2 CPU workers", 18, "  2 CPU workers"),
        ("Host, last measured", 16, "Last measured"),
        ("Planned, by use", 12, "Planned"),
        ("  waits_for_something_long", 10, "  waits_f…"),
    ],
)
def test_a_name_loses_whole_words(name: str, room: int, shown: str):
    assert shortened(name, room) == shown


@pytest.mark.parametrize(
    ("end", "alive", "name"),
    [(None, True, "Host"), (None, False, "Host, last measured"), ("finished", True, "Host, last measured")],
)
def test_the_memory_of_a_run_that_ended_is_the_last_measured_one(tmp_path: Path, end, alive, name):
    panel = MemoryPanel()
    view = RunView(make_run(tmp_path, steps=5, end=end, alive=alive))
    panel.show(view, ended=view.ended)
    assert panel._parts[0][:2] == (name, "118 GiB of 192 GiB" if name == "Host" else "118 GiB")
    assert ("Planned, by use", "105 GiB", "bold") in panel._parts
    view.recent.clear()
    panel.show(view, ended=view.ended)
    assert panel._parts[0][:2] == ("Host, as planned", "105 GiB")
