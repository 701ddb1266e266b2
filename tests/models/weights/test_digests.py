"""Digests of stored tensors: whatever reads them, in whatever files they are, and when they are hashed."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.lora import LoRA, with_lora, without_adapters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import digests, file_backed, pretrained, safetensors_io
from rptrain.models.weights.digests import TensorDigests
from rptrain.models.weights.file_backed import FileBackedWeights
from rptrain.utils import file_digests
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel

from ... import run_tools as tools
from .test_mxfp4 import published  # noqa: F401 - a fixture

WHOLE = "model.embed_tokens.weight"
LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors of several pieces, blocks and a rest; and files count as old at once."""
    for module in (safetensors_io, digests, file_backed):
        monkeypatch.setattr(module, "PIECE", 1 << 10)
    for module in (safetensors_io, digests):
        monkeypatch.setattr(module, "CONVERTED", 1 << 8)
    monkeypatch.setattr(file_backed, "BLOCK", 1 << 8)
    monkeypatch.setattr(file_digests, "RECENT", 0.0)
    monkeypatch.setattr(file_digests, "folder", lambda: tmp_path / "digests")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tools.write_model(tmp_path / "model", hidden_size=64, intermediate_size=72)


def opened(directory: Path) -> tuple[ModelSpec, TensorDigests]:
    spec = registry.build(read_config(directory))
    files = pretrained.check(directory, spec)
    return spec, TensorDigests(files.tensors, files.stamps)


def hashed(directory: Path) -> dict[str, str]:
    """The digests if nothing but them is wanted."""
    spec, found = opened(directory)
    tensors = pretrained.check(directory, spec).tensors.values()
    in_parallel(lambda work: work(), (work for stored in tensors for work in found.works(stored)))
    return found.groups()


def loaded(directory: Path, dtype: torch.dtype, base: str = "bf16") -> dict[str, str]:
    """The digests of what a model in this type reads."""
    own, found = opened(directory)
    spec = with_base(with_lora(own, LoRA(r=2)), base) if base != "bf16" else own
    flats = [torch.zeros(unit.nbytes(dtype.itemsize), dtype=torch.uint8) for unit in spec.units]
    held = [
        {name: each for kind in unit.stored_views(flat, dtype) for name, each in kind.items()}
        for unit, flat in zip(spec.units, flats, strict=True)
    ]
    files = pretrained.check(directory, own)
    pretrained.load(files, without_adapters(spec), lambda index, name: held[index][name], digests=found)
    return found.groups()


def test_every_way_to_read_has_the_same_digests(directory: Path) -> None:
    expected = hashed(directory)
    assert [*expected] == sorted([WHOLE, "model.norm.weight", *(f"model.layers.{layer}" for layer in range(3))])
    assert loaded(directory, torch.float32) == loaded(directory, torch.bfloat16) == expected
    assert loaded(directory, torch.bfloat16, "nf4") == loaded(directory, torch.bfloat16, "int8") == expected


def test_of_published_experts_in_4_bits(published: tuple[Path, dict[str, Tensor]]) -> None:  # noqa: F811
    directory, _ = published
    expected = hashed(directory)
    for base in ("bf16", "mxfp4"):
        assert loaded(directory, torch.bfloat16, base) == expected
    own, found = opened(directory)
    spec = with_base(with_lora(own, LoRA(r=2)), "mxfp4")
    with FileBackedWeights(pretrained.check(directory, own), spec, torch.bfloat16) as files:
        for unit in files.units.values():
            unit.digest(found)
    groups = found.groups()
    assert groups == {name: digest for name, digest in expected.items() if name != WHOLE}  # which is held in memory


def test_other_files_with_the_same_tensors(directory: Path) -> None:
    expected = hashed(directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    save_file(dict(sorted(tensors.items(), reverse=True)), file, metadata={"made": "again"})
    assert hashed(directory) == expected


def flip_a_bit(tensor: Tensor) -> None:
    tensor.view(torch.uint8).view(-1)[-1:].bitwise_xor_(1)


def turn_around(tensor: Tensor) -> None:
    tensor.copy_(tensor.flip(0))


@pytest.mark.parametrize("change", [flip_a_bit, turn_around])
@pytest.mark.parametrize(("name", "group"), [(WHOLE, WHOLE), (LAYER, "model.layers.1")])
def test_one_bit_or_another_order_is_another_digest(
    directory: Path, name: str, group: str, change: Callable[[Tensor], object]
) -> None:
    expected = hashed(directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file)
    spec, found = opened(directory)
    files = pretrained.check(directory, spec)
    assert not found.groups()
    in_parallel(lambda work: work(), (work for stored in files.tensors.values() for work in found.works(stored)))
    assert found.differing(expected) == {group: [file]}


def without_hashing(*_: object) -> None:
    raise AssertionError("hashed")


def test_a_file_that_was_hashed_and_not_changed_is_not_hashed_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, found = opened(directory)
    params = [unit.views(torch.zeros(unit.numel)) for unit in spec.units]
    files = pretrained.check(directory, spec)
    pretrained.load(files, spec, lambda index, name: params[index][name], digests=found)
    found.keep()
    expected = found.groups()
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_io, "sha256", without_hashing)
        assert loaded(directory, torch.float32) == expected
    time.sleep(0.02)
    (file,) = directory.glob("*.safetensors")
    os.utime(file)
    monkeypatch.setattr(safetensors_io, "sha256", without_hashing)
    with pytest.raises(AssertionError, match="hashed"):
        loaded(directory, torch.float32)


def test_a_wrong_kept_digest_refuses_nothing(directory: Path) -> None:
    expected = hashed(directory)
    _, found = opened(directory)
    for stored in pretrained.check(directory, registry.build(read_config(directory))).tensors.values():
        for number in range(digests._count(stored)):
            found.add(stored, number, b"wrong")
    found.keep()
    _, found = opened(directory)
    assert found.groups() != expected
    assert found.differing(expected) == {} and found.groups() == expected


def test_a_file_that_changes_while_it_is_read(directory: Path) -> None:
    (file,) = directory.glob("*.safetensors")
    spec, found = opened(directory)
    stamps = pretrained.check(directory, spec)
    time.sleep(0.02)
    os.utime(file)
    with pytest.raises(UserError, match=r"model\.safetensors was changed while it was read: try again"):
        found.keep()
    with pytest.raises(UserError, match=r"model\.safetensors was changed while it was read: try again"):
        TensorDigests(stamps.tensors, stamps.stamps)
    file.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors was changed while it was read: try again"):
        found.keep()
