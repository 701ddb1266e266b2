"""The model that the time to a first token is measured with, and the page cache."""

from pathlib import Path

import pytest
import torch

from benchmarks import first_token
from rptrain.inference.model import find_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(first_token.SIZES, "small", (16, 24, 2, 2, 1, 300))
    first_token.write_model(tmp_path / "model", "small")
    return tmp_path / "model"


def test_its_weights_are_small_and_not_all_the_same(model: Path) -> None:
    found = find_model(model)
    flats = [torch.zeros(unit.nbytes(2), dtype=torch.uint8) for unit in found.spec.units]
    found.load(flats)
    embedding = found.spec.units[0].views(flats[0].view(torch.bfloat16))[found.spec.units[0].params[0].name]
    assert embedding.abs().max() < 1 / 32 and embedding.abs().min() >= 1 / 64
    assert len(embedding.unique()) > 200


def test_what_is_in_the_page_cache(model: Path) -> None:
    (file, *_) = sorted(model.glob("*.safetensors"))
    first_token.read(file)
    assert first_token.resident(file) == file.stat().st_size
