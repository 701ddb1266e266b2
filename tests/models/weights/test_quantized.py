"""Which matrices of a base are held in 4 or 8 bits, and that a checkpoint's tensors become the codes they should."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.engine.memory.store import ModelStore
from rptrain.kernels.quant import FORMATS, MXFP4, Quantized, format_of, fp8_format, quantize
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.lora import LoRA, set_magnitudes, with_lora, without_adapters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import pretrained, quantized
from rptrain.utils.errors import UserError

from ...layouts import layout_of

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
DENSE, MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
BASES = (*FORMATS, "fp8")


@pytest.fixture
def stored(fresh, tmp_path):
    """A directory with a model's float32 checkpoint, and its tensors."""

    def store(architecture, **changes):
        model = fresh(architecture, **SIZES | changes)
        for params in model.params:
            for tensor in params.values():
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
        pretrained.save(tmp_path / architecture, model.spec, model.view, torch.float32)
        return tmp_path / architecture, load_file(tmp_path / architecture / "model.safetensors")

    return store


def spec_of(directory, base, **lora):
    return with_base(with_lora(registry.build(read_config(directory)), LoRA(r=2, **lora)), base)


def loaded(directory, base):
    store = ModelStore(spec_of(directory, base), layout_of(torch.bfloat16, generations=1))
    pretrained.load(
        pretrained.check(directory, without_adapters(store.spec)), without_adapters(store.spec), store.stored_view
    )
    return store


def names(spec):
    return {param.name for unit in spec.units for param in unit.quantized}


@pytest.mark.parametrize(
    ("architecture", "base", "expected"),
    [
        (DENSE, "nf4", {"qkv", "o", "gate_up", "down"}),
        (MOE, "int8", {"qkv", "o", "experts_gate_up", "experts_down"}),
        (MOE, "mxfp4", {"qkv", "o", "experts_gate_up"}),  # 12 inputs of `down` are no block of 32
        ("GptOssForCausalLM", "mxfp4", {"experts_gate_up", "experts_down"}),  # as it is published
        ("GptOssForCausalLM", "int8", {"qkv", "o", "experts_gate_up", "experts_down"}),
        (MOE, "fp8", {"qkv", "o", "experts_gate_up", "experts_down"}),  # rows of any length
        ("GptOssForCausalLM", "fp8", {"qkv", "o", "experts_gate_up", "experts_down"}),
        (DENSE, "bf16", set()),
    ],
)
def test_matrices_of_layers_are_quantized_and_nothing_else(stored, architecture, base, expected):
    """Not the tables, the head, norms, biases and routers, nor what is trained."""
    changes = {"moe_intermediate_size": 12} if architecture == MOE else {}
    spec = spec_of(stored(architecture, **changes)[0], base)
    assert names(spec) == expected
    for index, unit in enumerate(spec.units):
        assert not unit.quantized or (not unit.trainable and any(index in layer.units for layer in spec.layers))


def test_what_is_trained_whole_is_not_quantized(stored):
    spec = spec_of(stored(DENSE)[0], "nf4", target_modules=("q_proj",), modules_to_save=("o_proj",))
    assert names(spec) == {"qkv", "gate_up", "down"}


def test_a_model_without_whole_blocks_is_refused(fresh, tmp_path):
    spec = fresh(DENSE, **SIZES | {"hidden_size": 40, "intermediate_size": 24, "head_dim": 10}).spec
    with pytest.raises(UserError, match=r'lora.base: no matrix .* whole blocks of mxfp4; use "bf16"'):
        with_base(with_lora(spec, LoRA()), "mxfp4")


@pytest.mark.sample(8)
@pytest.mark.parametrize("read", [4 * 384, 2000, 1 << 20])  # 500 elements are no whole blocks
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("architecture", [DENSE, MOE])
def test_codes_are_those_of_each_tensor_of_the_checkpoint(stored, monkeypatch, architecture, base, read):
    """By itself, from the file's own values, also where a thread reads a part of it; the rest is as it was."""
    directory, tensors = stored(architecture)
    monkeypatch.setattr(quantized, "READ", read)
    quantized_elements = 0
    with loaded(directory, base) as store:
        for index, unit in enumerate(without_adapters(store.spec).units):
            for param in unit.params:
                whole, start = store.view(index, param.name), 0
                for part in param.parts:
                    tensor = tensors[part.key]
                    if param.format is None:
                        expected = tensor.bfloat16()
                    else:
                        numel = tensor.numel()
                        held = store.units[index].quantized[param.name].part(start, start + numel)
                        codes, scales = quantize(tensor, format_of(base, tensor.shape[-1]))
                        assert torch.equal(held.codes, codes) and torch.equal(held.scales, scales), part.key
                        expected = held.dequantize(torch.empty(tensor.shape, dtype=torch.bfloat16))
                        quantized_elements += numel
                    rows = whole[start // max(tensor[0].numel(), 1) :][: part.rows]
                    assert torch.equal(rows, expected), part.key
                    start += tensor.numel()
    assert quantized_elements > 0


def test_published_experts_stay_in_mxfp4_and_other_matrices_have_a_scale_per_row(stored):
    spec = spec_of(stored("GptOssForCausalLM")[0], "fp8")
    formats = {param.name: param.format for param in spec.units[1].quantized}
    assert formats == {
        "qkv": fp8_format(64), "o": fp8_format(64), "experts_gate_up": MXFP4, "experts_down": MXFP4,
    }  # fmt: skip
    (qkv,) = (param for param in spec.units[1].quantized if param.name == "qkv")
    assert qkv.format.scale_count(qkv.numel) == qkv.shape[0]


@pytest.mark.parametrize(("architecture", "name"), [(DENSE, "down"), ("GptOssForCausalLM", "experts_gate_up")])
def test_a_thread_reads_a_piece_at_a_time(stored, monkeypatch, architecture, name):
    """Of READ bytes at most, or of one row of blocks where a matrix is turned; together they are the tensor."""
    directory, tensors = stored(architecture)
    monkeypatch.setattr(quantized, "READ", 4 * 512)
    spec = spec_of(directory, "nf4")
    param = next(param for param in spec.units[1].quantized if param.name == name)
    held = Quantized.of(torch.empty(param.nbytes(2), dtype=torch.uint8), param.numel, param.format)
    file = pretrained.check(directory, without_adapters(spec)).tensors[param.parts[0].key]
    sizes = [piece.stored.shape[0] * piece.stored.shape[1] for piece in quantized.pieces(file, held, param.transposed)]
    assert sum(sizes) == tensors[param.parts[0].key].numel()
    assert max(sizes) == (512 if architecture == DENSE else param.format.block * param.shape[2])


@pytest.mark.parametrize("base", BASES)
def test_values_that_are_no_numbers_are_refused(stored, base):
    directory, tensors = stored(DENSE)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][5, 70] = float("inf")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name} holds values that are infinite or not numbers in {base}"):
        loaded(directory, base)


@pytest.mark.parametrize("base", ["bf16", *BASES])
def test_dora_begins_with_a_few_dequantized_rows_at_a_time(stored, monkeypatch, base):
    """And at the lengths of all of them."""
    spec = spec_of(stored(DENSE, hidden_size=96, intermediate_size=128)[0], base, use_dora=True)
    store, dequantized = ModelStore(spec, layout_of(torch.bfloat16, generations=1)), []
    pretrained.initialize(spec, store.stored_view, 1)
    dequantize = Quantized.dequantize
    monkeypatch.setattr(
        Quantized, "dequantize", lambda held, out: dequantized.append(out.numel()) or dequantize(held, out)
    )
    monkeypatch.setattr(quantized, "CHUNK_NUMEL", 1 << 10)
    set_magnitudes(spec, store.stored_view, {})
    assert all(numel <= 1 << 10 for numel in dequantized)
    assert bool(dequantized) == (base != "bf16")
    monkeypatch.undo()
    for layer in spec.layers:
        own, last = layer.units[:-1], layer.units[-1]
        for adapters in layer.adapters:
            params = {name: store.view(last, name) for name in adapters.params}
            (unit,) = (unit for unit in own for param in spec.units[unit].params if param.name == adapters.name)
            expected = adapters.norms(params, store.view(unit, adapters.name))
            assert torch.equal(params[adapters.magnitude], expected), adapters.name


@pytest.mark.parametrize("base", BASES)
def test_drawn_weights_follow_from_seed_and_name(stored, base):
    spec = spec_of(stored(DENSE)[0], base)
    drawn = []
    for seed in (1, 1, 2):
        store = ModelStore(spec, layout_of(torch.bfloat16, generations=1))
        pretrained.initialize(spec, store.stored_view, seed)
        drawn.append(store)
    first, again, other = ([state.params[0] for state in store.units] for store in drawn)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    matrix = drawn[0].view(1, "down").float()
    assert matrix.std().item() == pytest.approx(spec.config["initializer_range"], rel=0.1)
    assert not torch.equal(first[1], other[1])
    assert pretrained.not_finite(spec, drawn[0].stored_view) is None


def test_drawing_in_parts_changes_nothing(stored, monkeypatch):
    spec, drawn = spec_of(stored(DENSE)[0], "fp8"), []
    for most in (pretrained.DRAWN, 1024):  # of rows of 64 and of 96
        monkeypatch.setattr(pretrained, "DRAWN", most)
        store = ModelStore(spec, layout_of(torch.bfloat16, generations=1))
        pretrained.initialize(spec, store.stored_view, 1)
        drawn.append([unit for index in spec.frozen for unit in store.units[index].params])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
