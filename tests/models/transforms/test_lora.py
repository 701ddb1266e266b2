"""Adapters against PEFT on transformers, and against autograd; what their dropout, work and memory are."""

import copy
from dataclasses import replace

import pytest
import torch

from rptrain.kernels import dropout
from rptrain.kernels.reference.dense import wide
from rptrain.models.transforms.lora import ENDS, LoRA, adapted, set_magnitudes, target_names, with_lora
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from tests.families import FAMILIES
from tests.models.conftest import Native
from tests.models.layers.test_layers import EVERY_EXPERT, assert_memory_bounds, to_cuda

IDS, LABELS = torch.arange(22) * 7 % 61, torch.arange(22) * 11 % 61
MODELS = ["llama", "llama-tied", "qwen3", "qwen3-moe", "qwen3-moe-some-dense", "gpt-oss", "qwen3.5-moe", "qwen3-next"]
OTHERS = [[*cases.variants][-1] for cases in FAMILIES.values() if not cases.experts]
models = pytest.mark.parametrize("checkpoint", [*MODELS, *OTHERS], indirect=True)


def in_peft(model, settings: LoRA, targets):
    """The model with PEFT's adapters, their B random, and its adapters and trained weights by our names."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        target_parameters=list(settings.target_parameters) or None,
        modules_to_save=list(settings.modules_to_save) or None,
        ensure_weight_tying=bool(settings.modules_to_save) and model.config.tie_word_embeddings,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(3)
    trained = {}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.uniform_(-0.2, 0.2, generator=generator).add_("magnitude" in name)
                name = name.removeprefix("base_model.model.").replace("_vector.default.weight", "_vector")
                trained[name.replace(".default.weight", ".weight").replace(".modules_to_save", "")] = parameter
    return theirs, trained


def in_ours(base: Native, settings: LoRA, trained) -> Native:
    """Our model with the base's weights and these for its trained ones."""
    ours = Native(with_lora(base.spec, settings), base.dtype)
    source = base.tensors(base.params) | trained
    with torch.no_grad():
        for name, tensor in ours.tensors(ours.params).items():
            tensor.copy_(source[name])
    return ours


def fresh_lora(fresh, dtype=torch.float32, settings: LoRA | None = None, architecture="Qwen3ForCausalLM", **sizes):
    """A model with random weights and random adapters."""
    base = fresh(architecture, dtype, **sizes)
    settings = settings or LoRA(r=3, lora_alpha=5)
    spec = with_lora(base.spec, settings)
    generator = torch.Generator().manual_seed(4)
    tensors = {
        part.key: torch.empty(part.rows, *param.shape[1:]).uniform_(-0.3, 0.3, generator=generator)
        + (param.name.endswith("magnitude") and 1)
        for unit in spec.units[len(base.spec.units) :]
        for param in unit.params
        for part in param.parts
    }
    return in_ours(base, settings, tensors)


def batch(micro_batch, spec, dtype=torch.float32, sample=(3, 4, 5)):
    mb = micro_batch(spec, [[5, 6], [11]], LABELS, dtype)
    return replace(mb, sample=torch.tensor(sample))


SETTINGS = {
    "plain": LoRA(r=4, lora_alpha=8),
    "rank-one": LoRA(r=1, lora_alpha=3),
    "odd-rslora": LoRA(r=5, lora_alpha=8, use_rslora=True),
    "some": LoRA(r=3, target_modules=("k_proj", "o_proj")),
    "pattern": LoRA(r=3, target_modules=r".*\.1\.self_attn\.[qv]_proj"),
    "head-and-norm": LoRA(modules_to_save=("lm_head", "model.norm")),
    "dora": LoRA(r=4, lora_alpha=8, use_dora=True),
    "dora-some-rslora": LoRA(r=3, target_modules=("k_proj", "o_proj"), use_rslora=True, use_dora=True),
}


def assert_like_peft(ours, theirs, trained, mb) -> None:
    """Logits, loss and the gradient of every parameter that is trained, by name."""
    logits = theirs(IDS.view(2, 11)).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, LABELS, reduction="sum")
    expected.backward()
    size = logits.abs().max().item()
    torch.testing.assert_close(ours.logits(IDS, mb), logits, rtol=1e-5, atol=1e-5 * size)
    torch.testing.assert_close(ours.backward(IDS, mb), expected, rtol=1e-5, atol=1e-5)
    gradients = ours.gradients()
    assert gradients.keys() == trained.keys()
    for name, parameter in trained.items():
        size = parameter.grad.abs().max().item()
        assert size > 0
        # terms of those of keys cancel where keys have a norm, which leaves more of the rounding, by the CPU's order
        near = 5e-5 if "magnitude" in name or "k_proj" in name else 1e-5
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=near * size, msg=name)


def assert_recomputing_changes_no_bit(model: Native, mb) -> None:
    """Of outputs and all gradients, none of which is zero: by layer, saved by forward and recomputed."""
    x = model.params[0]["embed"][IDS]
    for layer in model.spec.layers:
        p, g = model.of(layer, model.params), model.of(layer, model.grads)
        y, saved = layer.forward_saved(p, x, mb)
        assert torch.equal(layer.forward(p, x, mb), y)
        gradients = []
        for kept in (saved, layer.recompute(p, x, mb)):
            for gradient in g.values():
                gradient.zero_()
            gradients.append([layer.backward(p, g, kept, y, mb), *(gradient.clone() for gradient in g.values())])
        assert all(gradient.any() for gradient in g.values())
        assert all(map(torch.equal, *gradients))
        x = y


@pytest.mark.sample(20)
@models
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logits_loss_and_every_gradient_are_those_of_peft(checkpoint, settings, native, micro_batch) -> None:
    model, directory = checkpoint
    if model.config.tie_word_embeddings and "lm_head" in settings.modules_to_save:
        settings = replace(settings, modules_to_save=("embed_tokens", "model.norm"))
    base = native(directory)
    if model.config.model_type == "phi3":  # whose product for queries, keys and values is stored as one
        fused = {("k_proj", "o_proj"): ("qkv_proj", "o_proj"), r".*\.1\.self_attn\.[qv]_proj": r".*\.1\..*qkv_proj"}
        settings = replace(settings, target_modules=fused.get(settings.target_modules, settings.target_modules))
    targets = settings.target_modules
    if model.config.model_type in ("qwen3_moe", "qwen3_next"):  # where PEFT reads patterns and "all-linear" otherwise
        targets = target_names(with_lora(base.spec, settings))
    theirs, trained = in_peft(model, settings, targets)
    ours = in_ours(base, settings, trained)
    assert_like_peft(ours, theirs, trained, micro_batch(ours.spec, [[11], [11]], LABELS))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("kind", [{}, {"lora_dropout": 0.4}, {"use_dora": True}])
def test_gradients_against_autograd_in_float64(architecture, kind, fresh, micro_batch, monkeypatch) -> None:
    monkeypatch.setattr("rptrain.kernels.dora.TOKENS", 8)
    model = fresh_lora(fresh, torch.float64, LoRA(r=3, lora_alpha=5, **kind), architecture)
    mb = batch(micro_batch, model.spec, torch.float64)
    loss = model.backward(IDS, mb, scale=0.7)
    trained = model.tensors([p if u.trainable else {} for p, u in zip(model.params, model.spec.units, strict=True)])
    leaves = [
        p.requires_grad_()
        for u, ps in zip(model.spec.units, model.params, strict=True)
        if u.trainable
        for p in ps.values()
    ]
    expected = torch.nn.functional.cross_entropy(model.logits(IDS, mb, keep=True), LABELS, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert trained.keys() == model.gradients().keys()
    ours = [gradient for unit in model.grads for gradient in unit.values()]
    for gradient, theirs in zip(ours, torch.autograd.grad(0.7 * expected, leaves), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [{"lora_dropout": 0.4}, {"use_dora": True}])
def test_saving_and_recomputing_change_no_bit(kind, dtype, fresh, micro_batch) -> None:
    model = fresh_lora(fresh, dtype, LoRA(r=3, lora_alpha=50, **kind))
    mb, other = (batch(micro_batch, model.spec, dtype, sample) for sample in ((3, 4, 5), (3, 5, 5)))
    x = model.params[0]["embed"][IDS]
    for layer in model.spec.layers:
        p, g = model.of(layer, model.params), model.of(layer, model.grads)
        y, saved = layer.forward_saved(p, x, mb)
        assert torch.equal(layer.forward(p, x, mb), y)
        assert torch.equal(layer.forward(p, x, other), y) == ("lora_dropout" not in kind)
        gradients = []
        for kept in (saved, layer.recompute(p, x, mb)):
            for gradient in g.values():
                gradient.zero_()
            gradients.append([layer.backward(p, g, kept, y, mb), *(gradient.clone() for gradient in g.values())])
        assert all(map(torch.equal, *gradients))
        x = y


def test_every_layer_and_product_drops_by_itself_and_decoding_drops_nothing(fresh, micro_batch) -> None:
    model = fresh_lora(fresh, settings=LoRA(r=3, lora_dropout=0.5))
    mb = batch(micro_batch, model.spec)
    masks = [a._mask(mb) for layer in model.spec.layers for a in layer.adapters]
    assert len({mask.number for mask in masks if mask}) == 2 * 4
    dry = replace(mb, sample=None)
    plain = fresh_lora(fresh, settings=LoRA(r=3))
    assert torch.equal(model.logits(IDS, dry), plain.logits(IDS, mb))
    assert not torch.equal(model.logits(IDS, mb), plain.logits(IDS, mb))


@pytest.mark.parametrize("use_dora", [False, True])
def test_sums_of_gradients_are_wide(use_dora, fresh, micro_batch) -> None:
    settings = LoRA(r=3, lora_alpha=5, use_dora=use_dora)
    narrow, exact = (fresh_lora(fresh, dtype, settings) for dtype in (torch.bfloat16, torch.float64))
    for unit, source in zip(exact.params, narrow.params, strict=True):
        for name, tensor in unit.items():
            tensor.copy_(source[name])
    for model in (narrow, exact):
        model.backward(IDS, batch(micro_batch, model.spec, model.dtype))
    for name, gradient in narrow.gradients().items():
        assert gradient.dtype == wide(torch.bfloat16)
        theirs = exact.gradients()[name]
        assert (gradient.double() - theirs).norm() <= 0.1 * theirs.norm(), name


def test_a_fresh_adapter_is_that_of_peft_and_adds_nothing(fresh, micro_batch) -> None:
    base = fresh("Qwen3ForCausalLM", hidden_size=64)
    model = in_ours(base, LoRA(), {name: 0 for name in _adapter_names(base.spec, LoRA())})
    units = range(len(base.spec.units), len(model.spec.units))
    pretrained.initialize(model.spec, model.view, seed=5, units=units)
    tensors = model.tensors(model.params)
    for name, tensor in tensors.items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any()
        if name.endswith("lora_A.weight"):  # kaiming_uniform_ with a = sqrt(5)
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert tensor.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert len({tensors[name].sum().item() for name in tensors if name.endswith("lora_A.weight")}) == 14
    mb = batch(micro_batch, model.spec)
    assert torch.equal(model.logits(IDS, mb), base.logits(IDS, mb))


FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("Qwen3ForCausalLM", FLOAT), ("Qwen3ForCausalLM", HALF), ("GptOssForCausalLM", FLOAT)],
)
def test_fresh_magnitudes_are_those_of_peft_and_change_nothing(architecture, dtype, fresh, micro_batch) -> None:
    base = fresh(architecture, dtype)
    settings = LoRA(use_dora=True)
    model = in_ours(base, settings, {name: 0 for name in _adapter_names(base.spec, settings)})
    units = range(len(base.spec.units), len(model.spec.units))
    pretrained.initialize(model.spec, model.view, seed=5, units=units)
    set_magnitudes(model.spec, model.view, {})
    tensors = model.tensors(model.params)
    for name in adapted(model.spec):
        expected = torch.linalg.norm(tensors[f"{name}.weight"], dim=1)
        torch.testing.assert_close(tensors[f"{name}.lora_magnitude_vector"], expected)
    mb = batch(micro_batch, model.spec, dtype)
    ours, plain = model.logits(IDS, mb), base.logits(IDS, mb)
    if dtype == FLOAT:  # residuals are added to a product that is rounded already
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    else:
        assert (ours - plain).norm() <= 0.02 * plain.norm()


def test_dora_drops_nothing(fresh) -> None:
    with pytest.raises(UserError, match=r"set lora\.lora_dropout = 0"):
        with_lora(fresh("LlamaForCausalLM").spec, LoRA(lora_dropout=0.1, use_dora=True))


def test_the_numbers_of_a_fresh_adapter_stay_for_ever(fresh) -> None:
    spec = with_lora(fresh("LlamaForCausalLM").spec, LoRA(r=2))
    model = Native(spec, torch.float32)
    pretrained.initialize(spec, model.view, seed=5)
    found = model.tensors(model.params)["model.layers.1.self_attn.v_proj.lora_A.weight"][1, :3]
    assert found.tolist() == [-0.1575998067855835, 0.013797663152217865, -0.0666445642709732]


def _adapter_names(spec, settings: LoRA) -> list[str]:
    ends = ENDS if settings.use_dora else ENDS[:2]
    return [name + end for name in adapted(with_lora(spec, settings)) for end in ends]


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("kind", [{}, {"lora_dropout": 0.4}, {"use_dora": True}])
def test_cuda_follows_float64_and_never_waits(architecture, kind, fresh, micro_batch) -> None:
    """With the masks of the CPU."""
    settings = LoRA(r=3, lora_alpha=5, **kind)
    model, exact = (
        fresh_lora(fresh, dtype, settings, architecture, head_dim=16, **EVERY_EXPERT)
        for dtype in (torch.bfloat16, torch.float64)
    )
    for unit, source in zip(exact.params, model.params, strict=True):
        for name, tensor in unit.items():
            tensor.copy_(source[name])
    expected = exact.backward(IDS, batch(micro_batch, exact.spec, torch.float64))
    mb = batch(micro_batch, model.spec)
    on_cuda = replace(to_cuda(model, mb), sample=torch.tensor((3, 4, 5)).cuda())
    ids = IDS.cuda()
    loss = model.backward(ids, on_cuda)
    found = {name: gradient.double().cpu() for name, gradient in model.gradients().items()}
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=0.1, atol=0)
    for name, theirs in exact.gradients().items():
        assert (found[name] - theirs).norm() <= 0.1 * theirs.norm(), name
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.backward(ids, on_cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 160, 4, 2, 4), (64, 32, 8, 8, 64), (96, 24, 4, 1, 9), (64, 640, 1, 1, 16)])
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_bounds_of_memory_hold(use_dora, dtype, sizes, fresh, micro_batch) -> None:
    """As those of a dense block in test_layers.py."""
    check_bounds(sizes, dtype, {"use_dora": use_dora}, fresh, micro_batch)


def test_bounds_of_memory_hold_with_dropout(fresh, micro_batch, monkeypatch) -> None:
    """Whose mask on the CPU is made of wide integers, in parts."""
    monkeypatch.setattr(dropout, "PART", 4096)
    check_bounds((64, 640, 1, 1, 16), torch.float32, {"lora_dropout": 0.5}, fresh, micro_batch)


def check_bounds(sizes, dtype, kind, fresh, micro_batch) -> None:
    hidden, intermediate, heads, kv_heads, r = sizes
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": 64}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = fresh_lora(fresh, dtype, LoRA(r=r, **kind), **shape, **heads_of)
    tokens = 512
    torch.manual_seed(6)
    mb = replace(micro_batch(model.spec, [[2]] * 256, torch.randint(61, (tokens,))), sample=torch.tensor((3, 4, 5)))
    layer = model.spec.layers[0]
    p, g = model.of(layer, model.params), model.of(layer, model.grads)
    x, dy = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
    itemsize = dtype.itemsize
    bare = layer.with_products(lambda product: replace(product, adapters=None))
    assert layer.kept_bytes(tokens, itemsize) == bare.kept_bytes(tokens, itemsize)
    assert_memory_bounds(layer, p, g, x, dy, mb)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_workspace_of_ranks_by_hand(itemsize, fresh) -> None:
    """Of 10 tokens and the three adapters of qkv: the product with A and its gradient, and one of them in float32."""
    spec = fresh("LlamaForCausalLM").spec
    few, more = (with_lora(spec, LoRA(r=r)).layers[0].workspace_bytes(10, itemsize) for r in (3, 5))
    assert more - few == 10 * 3 * (5 - 3) * (2 * itemsize + 4)


def test_workspace_and_traffic_of_dropout_by_hand(fresh) -> None:
    spec = fresh("LlamaForCausalLM").spec
    dry, wet = (with_lora(spec, LoRA(r=3, lora_dropout=p)).layers[0] for p in (0, 0.1))
    widest = 24  # of the inputs of products: 24, 24, 24 and 20
    assert wet.workspace_bytes(10, 2) - dry.workspace_bytes(10, 2) == 10 * 2 * widest
    ahead, back = (w.traffic - d.traffic for w, d in zip(wet.work(10, 5, 2), dry.work(10, 5, 2), strict=True))
    inputs = 24 + 24 + 24 + 20
    assert ahead == 10 * 2 * 2 * inputs  # read, and written with zeros
    assert back == 10 * 2 * 3 * inputs  # the same again, and the part of the gradient that is added is read


def test_work_by_hand(fresh) -> None:
    """D 24, queries and keys of 24 and 12, I 20; rank 3 for v, o and down."""
    spec = fresh("LlamaForCausalLM").spec
    base, layer = spec.layers[0], with_lora(spec, LoRA(r=3, target_modules=("v_proj", "o_proj", "down_proj"))).layers[0]
    plain, adapted = base.work(10, 5, 2), layer.work(10, 5, 2)
    low, high = 3 * (24 + 24 + 20), 3 * (12 + 24 + 24)
    assert adapted[0].matmul - plain[0].matmul == 2 * 10 * (low + high)
    # the product with A again, the gradients of both products' inputs and of both weights
    assert adapted[1].matmul - plain[1].matmul == 2 * 10 * (low + 2 * high + 2 * low)
    assert adapted[0].traffic - plain[0].traffic == 10 * 2 * 2 * (12 + 24 + 24)  # added to columns of the product
    assert adapted[1].traffic - plain[1].traffic == 10 * 2 * 2 * (24 + 24 + 20)  # added to the input's gradient
    inputs, outputs = 10 * 2 * (24 + 24 + 20), 10 * 2 * (12 + 24 + 24)
    assert plain[0].low_rank == plain[1].low_rank == 0 and adapted[0].low_rank == inputs
    assert adapted[1].low_rank == 2 * (inputs + outputs)


def test_work_of_dora_by_hand(fresh) -> None:
    """D 24, values of 12; rank 3 for v."""
    spec = fresh("LlamaForCausalLM").spec
    plain, scaled = (
        with_lora(spec, LoRA(r=3, target_modules=("v_proj",), use_dora=dora)).layers[0].work(10, 5, 2)
        for dora in (False, True)
    )
    norms, product, adapter = 2 * 12 * 24 * 3, 2 * 10 * 12 * 24, 2 * 10 * 3 * (12 + 24)
    assert scaled[0].matmul - plain[0].matmul == norms
    assert scaled[1].matmul - plain[1].matmul == norms + product + adapter  # the product again, for the magnitudes
    assert scaled[0].traffic - plain[0].traffic == 2 * (12 * 24 + 10 * 2 * 12)  # the weight, and the scaling
    assert scaled[1].traffic - plain[1].traffic == 2 * (12 * 24 + 10 * 4 * 12)  # with the product of both gradients
