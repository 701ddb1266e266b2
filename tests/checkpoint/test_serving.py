"""What vLLM needs for an exported adapter, by its adapter_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from rptrain.checkpoint.serving import serving

PLAIN = {"r": 8, "use_dora": False, "modules_to_save": None, "target_parameters": None}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def written(directory: Path, **settings: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(PLAIN | settings))
    return directory


def test_a_whole_model_needs_nothing(tmp_path: Path):
    assert serving(tmp_path) is None


@pytest.mark.parametrize(("r", "rank"), [(1, 1), (2, 8), (8, 8), (12, 16), (300, 320), (512, 512)])
def test_the_smallest_rank_that_fits(tmp_path: Path, r: int, rank: int):
    found = serving(written(tmp_path, r=r))
    assert found and found.max_lora_rank == rank and not found.refused and not found.note()


@pytest.mark.parametrize("names", [BOTH, BOTH[::-1], ["experts.gate_up_proj", "down_proj", "mlp.gate_proj.weight"]])
def test_adapters_of_experts(tmp_path: Path, names: list[str]):
    """vLLM compares the rank of one expert with its option; the tensors have the ranks of all experts."""
    found = serving(written(tmp_path, r=4, target_parameters=names))
    assert found and found.to_dict() == {"max_lora_rank": 8, "enable_mixed_moe_lora_format": True, "refused": ()}
    assert all(part in found.note() for part in ("--max-lora-rank 8", "is_3d_lora_weight", "--merge"))


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["model.norm"]}, "trained in full"),
        ({"target_parameters": BOTH[:1]}, "without one of"),
        ({"target_parameters": BOTH[1:]}, "without one of"),
        ({"r": 513}, "ranks above 512"),
    ],
    ids=["dora", "modules", "gate-and-up", "down", "rank"],
)
def test_what_only_a_merged_model_serves(tmp_path: Path, settings: dict[str, Any], refused: str):
    found = serving(written(tmp_path, **settings))
    assert found and len(found.refused) == 1 and refused in found.refused[0]
    assert "--merge" in found.note() and "--max-lora-rank" not in found.note()


def test_weights_of_dense_and_shared_mlps_are_ordinary(tmp_path: Path):
    names = ["mlp.gate_proj.weight", "mlp.shared_experts.down_proj.weight"]
    found = serving(written(tmp_path, target_parameters=names))
    assert found and not found.enable_mixed_moe_lora_format and not found.refused
