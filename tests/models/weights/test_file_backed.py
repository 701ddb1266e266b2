"""Frozen units in files: byte for byte what they are in memory, from every layout that is stored as it is held."""

import random
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.engine.memory.arena import aligned
from rptrain.engine.memory.store import ModelStore
from rptrain.kernels.quant import Quantized
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.lora import UNIT, LoRA, adapter_units, set_magnitudes, with_lora, without_adapters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import file_backed, pretrained, quantized
from rptrain.models.weights.file_backed import FileBackedUnit, FileBackedWeights, file_backed_units
from rptrain.models.weights.safetensors_io import as_bytes
from rptrain.utils.errors import UserError

from ...layouts import layout_of
from .test_mxfp4 import published  # noqa: F401 - a fixture

LORA = LoRA(r=2)


def with_adapters(directory, base="bf16"):
    return with_base(with_lora(registry.build(read_config(directory)), LORA), base)


def in_memory(directory, spec):
    """A store of the checkpoint, all of it held."""
    store = ModelStore(spec, layout_of(torch.bfloat16, generations=1))
    own = without_adapters(spec)
    pretrained.load(pretrained.check(directory, own), own, store.stored_view, spec.frozen)
    return store


def opened(directory, spec, dtype=torch.bfloat16):
    return FileBackedWeights(pretrained.check(directory, without_adapters(spec)), spec, dtype)


def assert_the_same(directory, spec, monkeypatch):
    monkeypatch.setattr(file_backed, "BLOCK", 1 << 10)
    choose = random.Random(0)
    with in_memory(directory, spec) as store, opened(directory, spec) as files:
        assert files.units.keys() == {*file_backed_units(spec)} == {*spec.frozen} - {0} != set()
        for index, unit in files.units.items():
            flat = as_bytes(store.units[index].params[0])
            assert unit.nbytes == len(flat)
            assert unit.digest() == sha256(flat).hexdigest()
            for _ in range(30):
                start, stop = sorted(choose.choices(range(unit.nbytes + 1), k=2))
                buffer = bytearray(b"x" * (stop - start))
                unit.read(start, memoryview(buffer))
                assert buffer == flat[start:stop]
            for param in unit.unit.params:
                stored, expected = unit.stored(param.name), store.stored_view(index, param.name)
                assert isinstance(stored, Quantized) == isinstance(expected, Quantized)
                pairs = (
                    zip(stored[:2], expected[:2], strict=True)
                    if isinstance(stored, Quantized)
                    else [(stored, expected)]
                )
                assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_separate_tensors_of_products_and_experts_in_shards(fresh, tmp_path, architecture, monkeypatch):
    model = fresh(architecture)
    pretrained.save(tmp_path, model.spec, model.view, torch.bfloat16, max_shard_bytes=5000)
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    assert_the_same(tmp_path, with_adapters(tmp_path), monkeypatch)


def test_experts_of_a_layer_in_one_tensor(fresh, tmp_path, monkeypatch):
    model = fresh("Qwen3MoeForCausalLM")
    pretrained.save(tmp_path, model.spec, model.view, torch.bfloat16)
    file = tmp_path / pretrained.SINGLE
    tensors = load_file(file)
    for param in (param for unit in model.spec.units for param in unit.params if param.stack):
        parts = torch.cat([tensors.pop(part.key) for part in param.parts])
        tensors[param.stack.key] = parts.view(param.stack.count, -1, *parts.shape[1:])
    save_file(tensors, file)
    assert_the_same(tmp_path, with_adapters(tmp_path), monkeypatch)


def test_parameters_with_a_type_of_their_own(fresh, tmp_path):
    def with_type(param):
        return replace(param, dtype=torch.float32) if param.name == "qkv_bias" else param

    def with_types(spec):
        """The model with float32 biases, and only adapters trained."""
        units = [
            replace(unit, params=tuple(map(with_type, unit.params)), trainable=unit.name.endswith(UNIT))
            for unit in spec.units
        ]
        return replace(spec, units=tuple(units))

    model = fresh("Qwen2ForCausalLM", head_dim=6)  # biases that end between two multiples of the alignment
    model.view(1, "qkv_bias").normal_(generator=torch.Generator().manual_seed(0))
    spec = with_types(model.spec)
    files = pretrained.save(tmp_path, spec, model.view, torch.bfloat16)
    types = {name: stored.dtype for name, stored in files.tensors.items()}
    assert {kind for name, kind in types.items() if name.endswith("_proj.bias")} == {torch.float32}
    assert {kind for name, kind in types.items() if not name.endswith("_proj.bias")} == {torch.bfloat16}
    spec = with_types(with_adapters(tmp_path))
    with opened(tmp_path, spec) as mapped:
        assert [spec.units[index].name for index in mapped.units] == ["norm", "head"], "the others are held in memory"
    store = in_memory(tmp_path, spec)
    biases = store.stored_view(1, "qkv_bias")
    assert biases.dtype == torch.float32 and torch.equal(biases, model.view(1, "qkv_bias"))
    assert store.sizes(store.spec, layout_of(store.dtype, generations=1))["frozen"] == sum(
        aligned(state.params[0].nbytes) for state in store.units if not state.unit.trainable
    )


def test_experts_in_4_bits_as_they_are(published, monkeypatch):  # noqa: F811
    directory, _ = published
    assert_the_same(directory, with_adapters(directory, "mxfp4"), monkeypatch)


def test_what_is_not_stored_as_it_is_held(published, fresh, tmp_path):  # noqa: F811
    directory, _ = published
    with pytest.raises(
        UserError, match=r'is stored in MXFP4, which only lora\.base = "mxfp4" .LoRA. leaves as it is'
    ) as e:
        opened(directory, with_adapters(directory))
    assert 'To convert them while they are loaded, use model.hold = "memory"' in str(e.value)
    model = fresh("GptOssForCausalLM", hidden_size=64, intermediate_size=32)
    pretrained.save(tmp_path / "wide", model.spec, model.view, torch.bfloat16)
    with pytest.raises(UserError, match=r"experts.gate_up_proj is stored as bfloat16, to be held in mxfp4"):
        opened(tmp_path / "wide", with_adapters(tmp_path / "wide", "mxfp4"))
    with pytest.raises(UserError, match=r"(?s)is stored as bfloat16, and model\.dtype is float32.*and \d+ more"):
        opened(tmp_path / "wide", with_adapters(tmp_path / "wide"), torch.float32)
    spec = freeze(registry.build(read_config(tmp_path / "wide")), ["model.embed_tokens.weight"])
    with pytest.raises(UserError, match="there are no frozen weights that could be read"):
        opened(tmp_path / "wide", spec)


def test_a_number_that_is_none_is_named(fresh, tmp_path):
    model = fresh("LlamaForCausalLM")
    model.params[2]["down"][1, 2] = float("nan")
    pretrained.save(tmp_path, model.spec, model.view, torch.bfloat16)
    spec = with_adapters(tmp_path)
    with opened(tmp_path, spec) as files:
        files.units[1].digest()
        with pytest.raises(
            UserError, match=r"model\.safetensors: model\.layers\.1\.mlp\.down_proj\.weight holds values"
        ):
            files.units[2].digest()


def test_a_file_that_was_changed_before_it_is_opened(fresh, tmp_path):
    model = fresh("LlamaForCausalLM")
    pretrained.save(tmp_path, model.spec, model.view, torch.bfloat16)
    spec = with_adapters(tmp_path)
    found = pretrained.check(tmp_path, without_adapters(spec))
    (tmp_path / pretrained.SINGLE).write_bytes((tmp_path / pretrained.SINGLE).read_bytes()[:-2])
    with pytest.raises(UserError, match=r"model\.safetensors was changed while it was in use"):
        FileBackedWeights(found, spec, torch.bfloat16)


def test_dora_begins_with_a_few_rows_at_a_time(fresh, tmp_path, monkeypatch):
    """At the lengths that it has where all is in memory."""
    model = fresh("LlamaForCausalLM", torch.bfloat16)
    pretrained.save(tmp_path, model.spec, model.view, torch.bfloat16)
    spec = with_lora(model.spec, LoRA(r=2, use_dora=True))
    taken, read = [], FileBackedUnit.rows
    monkeypatch.setattr(FileBackedUnit, "rows", lambda *given: taken.append(read(*given)) or taken[-1])
    monkeypatch.setattr(quantized, "CHUNK_NUMEL", 100)
    with in_memory(tmp_path, spec) as whole, opened(tmp_path, spec) as files:
        pretrained.initialize(spec, whole.stored_view, 0, adapter_units(spec))
        with ModelStore(spec, layout_of(torch.bfloat16, generations=1, file_backed=True), file_backed=files) as store:
            for index in store.in_memory:
                store.units[index].params[0].copy_(whole.units[index].params[0])
            monkeypatch.setattr(FileBackedUnit, "stored", None)
            set_magnitudes(spec, store.stored_view, store.file_backed)
            set_magnitudes(spec, whole.stored_view, {})
            assert taken and max(rows.numel() for rows in taken) <= 100
            for index in adapter_units(spec):
                found = store.units[index].params[0]
                assert torch.equal(found, whole.units[index].params[0]) and found.count_nonzero()
