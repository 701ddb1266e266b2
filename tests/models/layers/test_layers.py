import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rptrain.kernels.batch import Rotation
from rptrain.models.families import registry
from rptrain.models.layers.attention import Attention

architectures = pytest.mark.parametrize("architecture", registry.FAMILIES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
DOCUMENTS = [[5, 6], [11]]
EVERY_EXPERT = {"num_experts_per_tok": 5}  # so that rounding changes no choice


def times(name: str) -> int:
    """By how much more a gradient may be off: that of the keys' biases is a small difference of large sums."""
    return 2 if name.endswith("k_proj.bias") else 1


def to_cuda(model, mb):
    """Moves the model there; the micro-batch there."""
    for unit in (*model.params, *model.grads):
        unit.update({name: tensor.cuda() for name, tensor in unit.items()})
    names = ("positions", "labels", "cu_seqlens")
    rotations = [Rotation(*(table if table is None else table.cuda() for table in each)) for each in mb.rotations]
    return replace(mb, rotations=tuple(rotations), **{name: getattr(mb, name).cuda() for name in names})


@pytest.fixture
def batch(micro_batch):
    def build(model):
        torch.manual_seed(5)
        ids, labels = torch.randint(61, (22,)), torch.randint(61, (22,))
        labels[:3] = -100
        return ids, micro_batch(model.spec, DOCUMENTS, labels, model.dtype)

    return build


@architectures
def test_gradients_against_autograd_in_float64(architecture, fresh, batch) -> None:
    model = fresh(architecture, torch.float64)
    ids, mb = batch(model)
    loss = model.backward(ids, mb, scale=0.7)

    trained = (params for unit, params in zip(model.spec.units, model.params, strict=True) if unit.trainable)
    leaves = [tensor.requires_grad_() for params in trained for tensor in params.values()]
    expected = torch.nn.functional.cross_entropy(model.logits(ids, mb, keep=True), mb.labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    ours = [tensor for unit in model.grads for tensor in unit.values()]
    for gradient, theirs in zip(ours, torch.autograd.grad(0.7 * expected, leaves), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.sample(14)
@architectures
@dtypes
def test_narrow_types_follow_float64(architecture, dtype, fresh, batch) -> None:
    narrow, exact = (fresh(architecture, dtype, **EVERY_EXPERT) for dtype in (dtype, torch.float64))
    for unit, source in zip(exact.params, narrow.params, strict=True):
        for name, tensor in unit.items():
            tensor.copy_(source[name])
    losses = [model.backward(*batch(model)) for model in (narrow, exact)]
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=tolerance, atol=0)
    for name, gradient in narrow.gradients().items():
        theirs = exact.gradients()[name]
        assert (gradient.double() - theirs).norm() <= times(name) * tolerance * theirs.norm(), name


@pytest.mark.sample(14)
@architectures
@dtypes
def test_saving_changes_no_bit_and_nothing_aliases(architecture, dtype, fresh, batch) -> None:
    model = fresh(architecture, dtype)
    ids, mb = batch(model)
    x = model.params[0]["embed"][ids]
    for layer in model.spec.layers:
        p = model.of(layer, model.params)
        y, saved = layer.forward_saved(p, x, mb)
        assert torch.equal(layer.forward(p, x, mb), y) and y.dtype == dtype
        recomputed = layer.recompute(p, x, mb)
        dx = layer.backward(p, model.of(layer, model.grads), saved, y, mb)
        assert dx.dtype == dtype
        assert torch.equal(dx, layer.backward(p, model.of(layer, model.grads), recomputed, y, mb))
        inputs = {tensor.untyped_storage().data_ptr() for tensor in (x, *p.values())}
        assert not inputs & {y.untyped_storage().data_ptr(), dx.untyped_storage().data_ptr()}
        x = y
    head = model.spec.head
    p = model.of(head, model.params)
    loss, _ = head.loss_backward(p, model.of(head, model.grads), x, mb, 1.0)
    assert torch.equal(loss, head.loss(p, x, mb))


@pytest.mark.sample(14)
@architectures
@dtypes
def test_changing_a_document_changes_the_others_by_nothing(architecture, dtype, fresh, batch) -> None:
    model = fresh(architecture, dtype)
    ids, mb = batch(model)
    changed = ids.clone()
    changed[:5] = (changed[:5] + 7) % 61
    before, after = model.logits(ids, mb), model.logits(changed, mb)
    assert not torch.equal(before[:5], after[:5])
    # experts get another number of rows, and the CPU's library may add up the products of these in another order
    ulps = 16 if model.spec.layers[0].expert_products else 0
    atol = ulps * torch.finfo(dtype).eps * before.abs().max().item()
    torch.testing.assert_close(after[5:], before[5:], rtol=0, atol=atol)


@architectures
def test_no_products_of_a_block_share_a_name_or_a_mask(architecture, fresh) -> None:
    for layer in fresh(architecture).spec.layers:
        assert len({*layer.matrices}) == len(layer.matrices)
        assert len({product.mask for product in layer.products}) == len(layer.products)


def test_gradients_add_up(fresh, batch) -> None:
    model = fresh("Qwen3ForCausalLM", torch.float64)
    ids, mb = batch(model)
    model.backward(ids, mb)
    once = {name: gradient.clone() for name, gradient in model.gradients().items()}
    model.backward(ids, mb)
    for name, gradient in model.gradients().items():
        torch.testing.assert_close(gradient, 2 * once[name])


def test_a_tied_head_adds_to_the_embedding(fresh, batch) -> None:
    model = fresh("Qwen3ForCausalLM", torch.float64, tie_word_embeddings=True)
    head = model.spec.head
    assert head.units == (len(model.spec.units) - 1, 0) and "lm_head.weight" not in model.gradients()
    ids, mb = batch(model)
    model.backward(ids, mb)
    unused = [token for token in range(61) if token not in ids.tolist()]
    assert model.grads[0]["embed"][unused].abs().sum() > 0


@pytest.mark.gpu
@architectures
@pytest.mark.parametrize("documents", [DOCUMENTS, [[11], [11]]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_follows_float64(architecture, documents, deterministic, fresh, micro_batch) -> None:
    model, exact = (fresh(architecture, dtype, head_dim=16, **EVERY_EXPERT) for dtype in (torch.float16, torch.float64))
    for unit, source in zip(exact.params, model.params, strict=True):
        for name, tensor in unit.items():
            tensor.copy_(source[name])
    torch.manual_seed(5)
    ids, labels = torch.randint(61, (22,)), torch.randint(61, (22,))
    expected = exact.backward(ids, micro_batch(exact.spec, documents, labels, torch.float64))

    mb = to_cuda(model, micro_batch(model.spec, documents, labels))
    torch.use_deterministic_algorithms(deterministic)
    try:
        loss = model.backward(ids.cuda(), mb)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=0.01, atol=0)
    for name, gradient in model.gradients().items():
        theirs = exact.gradients()[name]
        assert (gradient.double().cpu() - theirs).norm() <= times(name) * 0.02 * theirs.norm(), name


@pytest.mark.gpu
@architectures
def test_cuda_never_waits(architecture, fresh, batch) -> None:
    model = fresh(architecture, torch.bfloat16, head_dim=16)
    ids, mb = batch(model)
    mb, ids = to_cuda(model, mb), ids.cuda()
    model.backward(ids, mb)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.backward(ids, mb)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, int] = {}  # by storage: how many tensors see it
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                if place in self.tensors:
                    self.tensors[place] += 1
                elif place in known:
                    continue
                else:
                    self.tensors[place] = 1
                    self.now += size
                    self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self.drop, place, size)
        return result

    def drop(self, place: int, size: int) -> None:
        self.tensors[place] -= 1
        if not self.tensors[place]:
            del self.tensors[place]
            self.now -= size


def assert_memory_bounds(layer, p, g, x, dy, mb) -> None:
    """Of what a layer keeps, and of what its backward needs beside."""
    tokens, itemsize = len(x), x.dtype.itemsize
    with LiveBytes() as live:
        y, saved = layer.forward_saved(p, x, mb)
        del y
        kept = live.now + x.nbytes
    assert 0.95 * layer.kept_bytes(tokens, itemsize) <= kept <= layer.kept_bytes(tokens, itemsize)
    with LiveBytes() as live:
        layer.backward(p, g, saved, dy, mb)
    assert live.peak <= layer.workspace_bytes(tokens, itemsize) <= 2 * live.peak


def test_memory_inside_a_mixer_counts_beside_fused_kernels(fresh, monkeypatch) -> None:
    layer = fresh("LlamaForCausalLM").spec.layers[0]
    monkeypatch.setattr(Attention, "workspace", lambda *_, fused: (1_000, 30_000))
    assert layer.workspace_bytes(7, 2, fused=True) == 7 * 31_000


@pytest.mark.sample(28)
@architectures
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [
        (64, 160, 4, 2, 5),
        (64, 32, 8, 8, 5),
        (96, 24, 4, 1, 5),
        (64, 640, 1, 1, 5),
        (64, 32, 8, 1, 5),
        (64, 32, 1, 1, 400),
    ],
)
def test_bounds_of_memory_hold(architecture, dtype, sizes, fresh, micro_batch) -> None:
    """Of blocks with attention, on documents so short that the scores of its reference weigh nothing."""
    hidden, intermediate, heads, kv_heads, experts = sizes
    model = fresh(
        architecture,
        dtype,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_local_experts=experts,
        head_dim=64,
    )
    rows, tokens = 256, 512
    torch.manual_seed(6)
    mb = micro_batch(model.spec, [[2]] * rows, torch.randint(61, (tokens,)))
    layer = next(layer for layer in model.spec.layers if isinstance(layer.mixer, Attention))
    p, g = model.of(layer, model.params), model.of(layer, model.grads)
    x, dy = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
    itemsize = dtype.itemsize
    assert_memory_bounds(layer, p, g, x, dy, mb)

    head = model.spec.head
    p, g = model.of(head, model.params), model.of(head, model.grads)
    with LiveBytes() as live:
        head.loss_backward(p, g, x, mb, 1.0)
    assert live.peak <= head.workspace_bytes(tokens, itemsize) <= 2 * live.peak
