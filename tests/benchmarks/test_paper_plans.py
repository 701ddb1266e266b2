"""The plans for the paper's machine: their table, their JSON, and the parts of a step's time."""

import json

import pytest

from benchmarks import paper_plans
from benchmarks.paper_plans import TYPES, Model, main


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A model that is planned quickly."""
    out = tmp_path_factory.mktemp("plans") / "plans.json"
    main([Model("Qwen3", "qwen3-1.7b", 64, 60000, ("train.micro_batch_size=4",))], TYPES, out)
    return json.loads(out.read_text())


def test_every_type_stands_beside_the_paper(found):
    rates = "estimated: 0.96 of the data sheet's peak, 0.86 in FP8, 0.80 with sums in float16"
    assert found["machine"] == {"gpus": 8, "card": "rtx4090", "rates": rates}
    model = found["plans"]["Qwen3"]
    assert list(model["types"]) == list(TYPES) and (model["sequences"], model["paper"]) == (64, 60000)
    speeds = [one["tokens_per_second"] for one in model["types"].values()]
    assert speeds[0] < min(speeds[1:])
    for one in model["types"].values():
        assert one["tokens_per_second"] == pytest.approx(64 * 2048 / one["seconds_per_step"])
        assert one["relative"] == pytest.approx(one["tokens_per_second"] / 60000)
    first, _, row = paper_plans.table(found["plans"], list(TYPES)).splitlines()
    assert first == "| tokens/s, estimated | bfloat16 | float16 sums | FP8 blocks alone | FP8 | the paper, measured |"
    assert row.startswith(f"| Qwen3, 64 sequences | {speeds[0]:,.0f} (") and row.endswith(" | 60,000 |")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("bfloat16", {"matmul", "attention"}),
        ("float16 sums", {"half"}),
        ("FP8 blocks alone", {"matmul", "attention", "fp8", "quantization"}),
        ("FP8", {"half", "fp8", "quantization"}),
    ],
)
def test_the_parts_are_the_time_in_which_devices_compute(found, name, kinds):
    values = found["plans"]["Qwen3"]["types"][name]
    parts = values["device_seconds"]
    assert {kind for kind, seconds in parts.items() if seconds} == {"elementwise", *kinds}
    assert sum(parts.values()) == pytest.approx(8 * values["seconds_per_step"] * (1 - values["bubble"]), rel=1e-6)
