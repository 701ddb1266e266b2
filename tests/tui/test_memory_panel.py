"""Names in the panel of memory, in whole words."""

import pytest

from rptrain.tui.widgets.memory_panel import shortened


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
        ("Planned, by use", 12, "Planned"),
        ("  waits_for_something_long", 10, "  waits_f…"),
    ],
)
def test_a_name_loses_whole_words(name: str, room: int, shown: str):
    assert shortened(name, room) == shown
