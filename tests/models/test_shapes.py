"""Sizes against transformers' models, work and memory against counts made by hand."""

from collections import Counter

import pytest
import torch

from rptrain.models.families import registry
from rptrain.models.locate import locate, presets, read_config
from rptrain.models.weights import pretrained
from rptrain.schedule.costs import Work
from rptrain.utils.errors import UserError
from tests.cases import long
from tests.families import FAMILIES
from tests.models.conftest import stored_bytes

TINY = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3_MOE = {**TINY, "model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 7}
GPT_OSS = {**TINY, "model_type": "gpt_oss", "num_local_experts": 5, "sliding_window": 4}
VARIANTS = {
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-tied": {**QWEN3_MOE, "tie_word_embeddings": True, "head_dim": 4},
    "qwen3-moe-some-dense": {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "gpt-oss": GPT_OSS,
    "gpt-oss-all-full": {**GPT_OSS, "layer_types": ["full_attention"] * 4, "num_experts_per_tok": 1},
}
PRESETS = {name: count for cases in FAMILIES.values() for name, count in cases.presets.items()}
SLOW = {name for cases in FAMILIES.values() if cases.slow for name in cases.presets}
variants = pytest.mark.parametrize("variant", VARIANTS)


def theirs(config, device="cpu"):
    """transformers' model of a config, with experts as plain products."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )


def parameters_by_unit(model) -> dict[str, int]:
    counts = Counter()
    for name, parameter in model.named_parameters():
        words = name.removeprefix("model.").split(".")
        unit = {"embed_tokens": "embed", "lm_head": "head"}.get(words[0], words[0])
        if unit == "layers":
            unit = f"layers.{words[1]}.decay" if words[-1] in ("A_log", "dt_bias") else f"layers.{words[1]}"
        counts[unit] += parameter.numel()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # which checkpoints have like parameters
            counts[f"layers.{name.split('.')[2]}.correction"] += buffer.numel()
    return dict(counts)


def sizes_of(shape) -> dict[str, int]:
    return {unit.name: sum(param.numel for param in unit.params) for unit in shape.units}


@variants
def test_units_have_the_sizes_of_transformers(variant) -> None:
    shape = registry.build(VARIANTS[variant])
    assert sizes_of(shape) == parameters_by_unit(theirs(VARIANTS[variant], "meta"))
    assert [shape.units[unit].name for layer in shape.layers for unit in layer.units] == [
        layer.name for layer in shape.layers
    ]


def test_every_preset_is_compared() -> None:
    assert [*sorted(PRESETS), "tiny-tasks"] == presets()


@pytest.mark.parametrize("preset", [long(name, id=name) if name in SLOW else name for name in PRESETS])
def test_presets_have_the_published_sizes(preset) -> None:
    config = read_config(locate(preset))
    shape = registry.build(config)
    assert shape.num_parameters == PRESETS[preset]
    assert sizes_of(shape) == parameters_by_unit(theirs(config, "meta"))


@variants
def test_parts_are_the_tensors_of_a_checkpoint(variant, tmp_path) -> None:
    theirs(VARIANTS[variant]).save_pretrained(tmp_path)
    shape = registry.build(read_config(tmp_path))
    files = pretrained.check(tmp_path, shape)
    assert sum(unit.name.startswith("layers") for unit in shape.units) == 4
    assert stored_bytes(files) == 4 * shape.num_parameters


@variants
def test_products_are_those_that_transformers_computes(variant) -> None:
    """Counted while it runs; attention apart, of which it computes all scores and hides some."""
    from torch.utils.flop_counter import FlopCounterMode

    rows, length = 3, 11
    model = theirs(VARIANTS[variant])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(61, (rows, length)))
    counted = Counter()
    for module, operations in counter.get_flop_counts().items():
        by_kind = Counter({str(operation): count for operation, count in operations.items()})
        if module == "Global":
            counted["matmul"] += by_kind["aten.mm"] + by_kind["aten.addmm"]
        if module.endswith(".experts"):
            counted["grouped"] += by_kind["aten.mm"] + by_kind["aten.addmm"]
    shape = registry.build(VARIANTS[variant])
    works = [layer.work(rows * length, length, 4) for layer in shape.stack]
    assert sum(forward.grouped for forward, _ in works) == counted["grouped"] > 0
    assert sum(forward.matmul for forward, _ in works) == counted["matmul"] - counted["grouped"]
    biased = sum(2 * rows * length * 24 * 5 for unit in shape.units for p in unit.params if p.name == "router_bias")
    assert sum(backward.matmul for _, backward in works) == 2 * sum(forward.matmul for forward, _ in works) + biased
    for forward, backward in works:
        assert (backward.grouped, backward.attention_backward) == (2 * forward.grouped, 2 * forward.attention)
        assert backward.attention == forward.attention_backward == 0


def test_work_of_experts_by_hand() -> None:
    """Two rows of 3 tokens, D 24, queries of 60, keys of 20, 3 of 5 experts of 7."""
    layer = registry.build(QWEN3_MOE).layers[0]
    forward, backward = layer.work(6, 3, 2)
    assert forward.matmul == 2 * 6 * 24 * (60 + 20 + 20 + 60 + 5)
    assert forward.grouped == 2 * 6 * 3 * (24 * 14 + 7 * 24)
    assert forward.attention == 2 * 2 * 2 * (1 + 2 + 3) * 60
    norm, rotation, sum_and_norm = 24 + 24, 80 + 80, 24 + 24 + 24 + 24
    router, gather, swiglu, combine, add = 5, 24 + 72, 42 + 21, 72 + 24, 24 + 24 + 24
    weights = 5 * (24 * 14 + 7 * 24)
    elements = norm + rotation + sum_and_norm + router + gather + swiglu + combine + add
    assert forward.traffic == 2 * (6 * elements + weights)
    # gradients gathered; the activation again, it and its gradient times the experts' weights, its backward; tokens
    # gathered again, their gradients combined, the router's softmax; two norms with the residual's gradient; the
    # rotation with both norms; the values' gradient
    experts = gather + swiglu + 2 * (21 + 21) + (21 + 42 + 42) + gather + combine
    assert backward.traffic == 2 * (6 * (experts + 2 * 5 + 2 * 4 * 24 + 3 * 80 + 2 * 20) + weights)


def test_work_of_biases_by_hand() -> None:
    """As above with experts of 20, a window, and biases in place of norms on queries and keys."""
    biased = registry.build(GPT_OSS).layers[0].work(6, 3, 2)[1]
    assert biased.matmul == 2 * 2 * 6 * 24 * (60 + 20 + 20 + 60 + 5) + 2 * 6 * 24 * 5  # and the weights' share of down
    assert biased.elementwise["biases, backward"] == 2 * 6 * (60 + 20 + 20 + 24 + 3 * 40 + 3 * 24)


def test_few_tokens_reach_few_experts() -> None:
    layer = registry.build({**QWEN3_MOE, "num_experts": 50}).layers[0]
    one, two, many, more = (layer.work(tokens, tokens, 2)[0].traffic for tokens in (1, 2, 100, 101))
    assert two - one == (more - many) + 2 * 3 * 3 * 24 * 7


@pytest.mark.parametrize(
    ("length", "windowed", "full"),
    [(11, 1 + 2 + 3 + 4 * 8, 66), (4, 10, 10), (2, 3, 3)],
)
def test_windows_bound_the_scores(length, windowed, full) -> None:
    layers = registry.build(GPT_OSS).layers
    pairs = [layer.work(5 * length, length, 2)[0].attention / (2 * 2 * 60 * 5) for layer in layers]
    assert pairs == pytest.approx([windowed, full, windowed, full])


@pytest.mark.parametrize(
    ("architecture", "normed", "biases"),
    [("LlamaForCausalLM", 0, 0), ("Qwen3ForCausalLM", 80, 0), ("Qwen2ForCausalLM", 0, 100)],
)
def test_traffic_of_a_dense_block_and_the_head_by_hand(architecture, normed, biases) -> None:
    spec = registry.build({**TINY, "architectures": [architecture]})
    block, head = spec.layers[0], spec.head
    forward, backward = block.work(8, 4, 4)
    assert forward.traffic == 4 * 8 * (48 + 160 + 96 + (40 + 20) + 72)
    assert backward.traffic == 4 * 8 * ((20 + 40 + 40 + 20) + 96 + 160 + normed + biases + 40 + 96)
    assert backward.elementwise["norm and sum, backward"] == 4 * 8 * 2 * 96  # of both norms
    forward, backward = head.work(8, 4, 4)
    assert (forward.matmul, backward.matmul) == (2 * 8 * 24 * 61, 4 * 8 * 24 * 61)
    assert (forward.traffic, backward.traffic) == (4 * 8 * (48 + 61), 4 * 8 * (61 + 72))
    assert forward.attention == backward.attention_backward == forward.grouped == 0


def test_kept_bytes_of_experts_by_hand() -> None:
    """D 24, queries of 60 in 6 heads, keys of 20 in 2, 3 of 5 experts, of 7 and of 20."""
    qwen3, gpt_oss = (registry.build(config).layers[0] for config in (QWEN3_MOE, GPT_OSS))
    inputs_and_norms, qkv_and_out = 4 * 24, 60 + 20 + 20 + 60
    statistics = 2 + 6  # both norms, log-sum-exp
    routing = 5 + 3  # logits and weights
    places = 3 * (4 + 4 + 4)  # the choice, rows by place, places by row
    elements = inputs_and_norms + qkv_and_out + routing + 3 * 2 * 20
    assert gpt_oss.kept_bytes(10, 2) == 10 * (2 * elements + 4 * statistics + places) + 4 * 5
    elements = inputs_and_norms + qkv_and_out + 80 + routing + 3 * 2 * 7
    assert qwen3.kept_bytes(10, 2) == 10 * (2 * elements + 4 * (statistics + 8) + places) + 4 * 5


def test_workspace_of_experts_by_hand() -> None:
    """Where the MLP needs most: D 24, 3 of 5 experts of 60, one narrow head; then where the router does."""
    narrow = {**GPT_OSS, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 60}
    tensors = 24 + 3 * (24 + 2 * 60)  # [T, D]; of the routed tokens gradients, the activation and its gradient
    layer = registry.build(narrow).layers[0]
    assert layer.workspace_bytes(10, 2) == 10 * (2 * tensors + 3 * 28 + 4 * 3 * 3 * 60)
    layer = registry.build({**narrow, "num_local_experts": 1000}).layers[0]
    assert layer.workspace_bytes(10, 2) == 10 * (2 * tensors + 3 * 28 + 4 * 3 * 1000)


@variants
def test_memory_grows_with_tokens_and_active_experts(variant) -> None:
    config = {**VARIANTS[variant], "head_dim": 2, "intermediate_size": 60, "moe_intermediate_size": 60}
    layers = registry.build(config).layers
    more = registry.build({**config, "num_experts_per_tok": 4}).layers
    for layer, larger in zip(layers, more, strict=True):
        for name in ("kept_bytes", "workspace_bytes"):
            size = getattr(layer, name)
            assert 0 < size(10, 2) < size(10, 4) and size(30, 2) - size(20, 2) == size(20, 2) - size(10, 2)
            assert (getattr(larger, name)(10, 2) > size(10, 2)) == bool(layer.expert_products)


def test_one_expert_needs_what_a_dense_block_does_and_its_routing() -> None:
    settings = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 20}
    expert, dense = (registry.build({**QWEN3_MOE, **settings, "mlp_only_layers": only}).layers[0] for only in ([], [0]))
    assert expert.expert_products and not dense.expert_products
    assert expert.kept_bytes(10, 2) == dense.kept_bytes(10, 2) + 10 * (2 + 2 + 3 * 4) + 4
    assert expert.workspace_bytes(10, 2) >= dense.workspace_bytes(10, 2)
    router = Work(matmul=2.0 * 10 * 24)
    assert expert.work(10, 5, 2)[0].flops == (dense.work(10, 5, 2)[0] + router).flops


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        (
            {**QWEN3_MOE, "moe_intermediate_size": None, "attention_bias": True, "num_experts_per_tok": 6},
            ["moe_intermediate_size is missing", "attention_bias True", "num_experts_per_tok 6 is more than num_exp"],
        ),
        (
            {**GPT_OSS, "sliding_window": -1, "quantization_config": {"quant_method": "awq"}},
            ["sliding_window must be", "quantization_config"],
        ),
        ({**GPT_OSS, "swiglu_limit": -1.0, "hidden_act": "gelu"}, ["swiglu_limit must be", "hidden_act 'gelu'"]),
        (
            {**QWEN3_MOE, "num_experts": None, "decoder_sparse_step": 0, "mlp_only_layers": "all", "vocab_size": 0},
            ["num_experts is missing", "decoder_sparse_step must be", "mlp_only_layers must be", "vocab_size must be"],
        ),
        ({**QWEN3_MOE, "use_sliding_window": True}, ["sliding-window"]),
        ({**QWEN3_MOE, "num_experts": 10**9}, ["num_experts is at most 4096"]),
        (
            {**GPT_OSS, "layer_types": ["full_attention"] * 3, "attention_bias": False, "num_local_experts": 2},
            ["each of 4 layers", "attention_bias False", "more than num_local_experts 2"],
        ),
        (
            {**GPT_OSS, "layer_types": ["chunked_attention"] * 4, "sliding_window": 0, "num_key_value_heads": 4},
            ["sliding_attention or full_attention", "sliding_window must be", "multiple of num_key_value_heads"],
        ),
    ],
    ids=["chosen", "quantized", "swiglu", "missing", "windows", "many-experts", "layers", "layer-types"],
)
def test_what_would_be_computed_wrongly_is_refused_with_all_problems(config, problems) -> None:
    with pytest.raises(UserError, match="cannot be trained here") as caught:
        registry.build(config)
    assert [problem for problem in problems if problem not in str(caught.value)] == []
    assert str(caught.value).count("\n- ") == len(problems)


def test_defaults_of_gpt_oss() -> None:
    """What config.json leaves out, or says null for, is what transformers takes."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    theirs = GptOssConfig()
    sizes = {key: value for key, value in GPT_OSS.items() if key not in ("head_dim", "sliding_window")}
    spec = registry.build({**sizes, "rope_scaling": None, "quantization_config": {"quant_method": "mxfp4"}})
    block, full = spec.layers[:2]
    sizes = theirs.head_dim, theirs.sliding_window
    assert (block.mixer.head_size, block.mixer.window, block.norms.eps) == (*sizes, theirs.rms_norm_eps)
    clamp = theirs.swiglu_alpha, theirs.swiglu_limit
    assert block.feed_forward.clamp == clamp and full.mixer.window is None
    rotary = GptOssRotaryEmbedding(theirs)
    assert torch.equal(torch.tensor(spec.rotaries[0].inv_freq), rotary.inv_freq)
    assert spec.rotaries[0].factor == pytest.approx(rotary.attention_scaling, rel=1e-14)


def test_biases_and_norms_do_not_decay() -> None:
    for config in (QWEN3_MOE, GPT_OSS):
        for unit in registry.build(config).units:
            for param in unit.params:
                assert param.decay != param.name.endswith(("norm", "bias", "sinks")), param.name
                assert (param.std is None) == param.name.endswith("norm"), param.name
                assert (param.std == 0) == param.name.endswith("bias"), param.name


def test_architectures_by_name_and_by_type() -> None:
    for config, name in ((QWEN3_MOE, "Qwen3MoeForCausalLM"), (GPT_OSS, "GptOssForCausalLM")):
        for spelled in (config, {**config, "architectures": [name]}):
            assert registry.build(spelled).architecture == name
    for unknown in ({"architectures": ["MambaForCausalLM"]}, {"architectures": [{}]}):
        with pytest.raises(UserError, match=r"supported are Glm4Moe.*, LlamaForCausalLM, .*, SmolLM3ForCausalLM$"):
            registry.build(unknown)
