"""The recipes: short, and with a plan that fits a machine of their kind."""

import pytest

from benchmarks.recipes import planned
from rptrain.config import recipes
from rptrain.machine.flags import MachineFlags

from ..cases import grid, long

MACHINES = {  # GPUs with 24 GB, and the memory of the host
    "continued-pretraining": (1, "128GiB"),
    "full-32b-8gpu": (8, "512GiB"),
    "full-8b": (1, "128GiB"),
    "long-context": (1, "64GiB"),
    "lora-235b": (1, "256GiB"),
    "lora-moe-30b": (1, "64GiB"),
    "qlora-8b": (1, "64GiB"),
}


def test_each_recipe_is_short_and_planned_below():
    assert recipes.names() == sorted(MACHINES)
    for name in MACHINES:
        assert len(recipes.text(name).splitlines()) < 40
        assert f"rptrain plan --config {name}.toml model.path=" in recipes.text(name)


SIMILAR = ("full-8b", "continued-pretraining")  # to others, as plans


@pytest.mark.parametrize(
    "name",
    [
        "long-context",
        *(
            grid(name, id=name) if name in SIMILAR else long(name, id=name)
            for name in MACHINES
            if name != "long-context"
        ),
    ],
)
def test_each_recipe_fits_the_machine_that_it_is_for(name):
    gpus, host = MACHINES[name]
    found = planned(name, MachineFlags(gpus=gpus, card="rtx4090", host=host))
    assert found.fits and not found.problem
