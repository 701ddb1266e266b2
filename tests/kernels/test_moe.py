"""Routing against the reference and transformers; a whole mixture of experts, forward and every gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels import moe
from rptrain.kernels.reference import moe as reference
from rptrain.kernels.swiglu import Clamp
from tests.kernels.exact import close, dtypes, no_worse, random

from .autograd import Combine, Gather, GroupedMM, Route, SwiGLU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (5, 4, 4), (33, 6, 2), (18, 128, 8), (3, 100, 1)]  # tokens, experts, chosen
shapes = pytest.mark.parametrize(("tokens", "experts", "active"), SHAPES)
FORMS = {
    "over-chosen": moe.Scoring(over_chosen=True),
    "over-all": moe.Scoring(over_chosen=False),
    "sigmoids": moe.Scoring(over_chosen=False, sigmoid=True, scale=1.7),
    "sigmoids-over-chosen": moe.Scoring(over_chosen=True, sigmoid=True, scale=0.6),
}
scorings = pytest.mark.parametrize("scoring", FORMS.values(), ids=FORMS)


@pytest.mark.sample(5)
@shapes
@dtypes
def test_choice(tokens, experts, active, dtype, device) -> None:
    logits = random((tokens, experts), dtype, device)
    choice = moe.choose_triton(logits, active)
    assert choice.dtype == torch.int32
    assert torch.equal(choice, reference.choose(logits, active))
    assert torch.equal(logits.gather(1, choice.long()), logits.topk(active).values)


def test_equal_logits_and_nan_give_distinct_experts_lower_first(device) -> None:
    logits = torch.tensor([[1.0, 2, 2, 1, 2], [0] * 5, [float("nan")] * 5, [float("-inf"), 0, 0, 0, 0]], device=device)
    expected = [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert moe.choose_triton(logits, 4).tolist() == expected
    assert reference.choose(logits, 4).tolist() == expected


@pytest.mark.sample(10)
@shapes
@dtypes
@scorings
def test_weights_and_their_gradient(tokens, experts, active, dtype, scoring, device) -> None:
    logits, dweights = random((tokens, experts), dtype, device), random((tokens, active), dtype, device, 1)
    choice = reference.choose(logits, active)
    dprobs, counted = random((experts,), torch.float32, device, 2), torch.arange(tokens, device=device) % 3 > 0
    exact, weights = reference.route(logits.double(), choice, scoring), moe.route_triton(logits, choice, scoring)
    assert weights.dtype == (torch.float32 if scoring.sigmoid else dtype)
    no_worse(weights, reference.route(logits, choice, scoring), exact)
    for balance in ((), (dprobs,), (dprobs, counted)):
        given = (logits, choice, scoring, *balance)
        exact = reference.route_backward(dweights.double(), logits.double(), *given[1:])
        ours = moe.route_backward_triton(dweights, *given)
        assert ours.dtype == dtype
        no_worse(ours, reference.route_backward(dweights, *given), exact)
        assert torch.equal(ours, moe.route_backward_triton(dweights, *given))


@scorings
@pytest.mark.parametrize("masked", [True, False])
def test_reference_of_routing_against_autograd(scoring, masked) -> None:
    logits, dweights, dprobs = (random(shape, torch.float64, "cpu") for shape in [(9, 5), (9, 3), (5,)])
    counted = torch.arange(9) % 2 > 0 if masked else None
    choice = reference.choose(logits, 3)
    at = logits.clone().requires_grad_()
    probs, place = at.softmax(1), choice.long()
    chosen = (at.sigmoid() if scoring.sigmoid else probs).gather(1, place)
    weights = (chosen / chosen.sum(1, keepdim=True) if scoring.over_chosen else chosen) * scoring.scale
    balance = probs * dprobs if counted is None else probs * dprobs * counted[:, None]
    ((weights * dweights).sum() + balance.sum()).backward()
    assert at.grad is not None
    close(reference.route(logits, choice, scoring), weights)
    close(reference.route_backward(dweights, logits, choice, scoring, dprobs, counted), at.grad)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_scores_that_choose_among_sigmoids(groups, kept, device) -> None:
    """Corrected, and -inf in groups whose two best sum to less."""
    logits, correction = random((17, 12), torch.float32, device), random((12,), torch.float32, device, 1)
    scores = moe.choice_scores(logits, correction, groups, kept)
    expected = logits.sigmoid() + correction
    for row, whole in zip(scores.tolist(), expected.tolist(), strict=True):
        size = 12 // groups
        parts = [whole[at : at + size] for at in range(0, 12, size)]
        best = sorted(range(groups), key=lambda group: -sum(sorted(parts[group])[-2:]))[:kept]
        assert row == [x if at // size in best else float("-inf") for at, x in enumerate(whole)]


def test_sigmoids_of_extreme_logits_are_finite(device) -> None:
    logits = torch.tensor([[-200.0, -300.0, 200.0, 300.0]], device=device)
    for chosen in ([0, 1], [2, 3], [0, 3]):
        choice = torch.tensor([chosen], dtype=torch.int32, device=device)
        for scoring in (FORMS["sigmoids"], FORMS["sigmoids-over-chosen"]):
            given, dweights = (logits, choice, scoring), torch.ones(1, 2, device=device)
            for route, back in (
                (reference.route, reference.route_backward),
                (moe.route_triton, moe.route_backward_triton),
            ):
                assert route(*given).isfinite().all() and back(dweights, *given).isfinite().all()


@shapes
def test_permutation_is_a_stable_sort(tokens, experts, active, device) -> None:
    choice = reference.choose(random((tokens, experts), torch.float32, device), active)
    perm = moe.permute(choice, experts)
    flat = choice.flatten().tolist()
    order = sorted(range(len(flat)), key=flat.__getitem__)
    assert perm.order.tolist() == order
    assert [order[place] for place in perm.places.flatten().tolist()] == list(range(len(flat)))
    assert perm.ends.tolist() == [sum(each <= expert for each in flat) for expert in range(experts)]
    assert {part.dtype for part in perm} == {torch.int32}
    ours = moe.invert_triton(torch.tensor(order, device=device), choice.shape)
    assert all(torch.equal(a, b) for a, b in zip(ours, perm, strict=False))


@pytest.mark.parametrize("masked", [True, False])
def test_balance_is_that_of_transformers(masked) -> None:
    """Two layers, of which the loss takes the sums."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    layers = [random((24, 6), torch.float32, "cpu", seed).requires_grad_() for seed in (0, 1)]
    mask = torch.ones(4, 6)
    mask[1, 4:] = 0
    theirs = load_balancing_loss_func(tuple(layers), 6, 2, mask if masked else None)
    assert isinstance(theirs, Tensor)
    (0.3 * theirs).backward()

    counted = mask.flatten() > 0 if masked else None
    rows = 2 * (22 if masked else 24)
    choices = [reference.choose(logits.detach(), 2) for logits in layers]
    counts = sum((moe.expert_counts(choice, 6, counted) for choice in choices), torch.zeros(6))
    dprobs = moe.balance_grad(counts, rows, 0.3)
    for logits, choice in zip(layers, choices, strict=True):
        nothing = torch.zeros_like(choice, dtype=torch.float32)
        ours = moe.route_backward(nothing, logits.detach(), choice, FORMS["over-chosen"], dprobs, counted)
        assert logits.grad is not None
        assert (ours - logits.grad).abs().max() <= 1e-5 * logits.grad.abs().max()


def ours_of(x: Tensor, router: Tensor, router_bias: Tensor | None, experts: list[Tensor], form: tuple) -> Tensor:
    """A mixture of experts of this project's operations; weights [E, K, M], with biases or without."""
    active, scoring, swiglu = form
    gate_up, gate_up_bias, down, down_bias = experts if len(experts) == 4 else (experts[0], None, experts[1], None)
    weights, choice = Route.apply(F.linear(x, router, router_bias), active, scoring)
    perm = moe.permute(choice, router.shape[0])
    product = GroupedMM.apply(Gather.apply(x, perm), gate_up, perm.ends, gate_up_bias)
    rows = GroupedMM.apply(SwiGLU.apply(product, *swiglu), down, perm.ends, down_bias)
    return Combine.apply(rows, weights, perm)


def with_random_parameters(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return module.to(DEVICE)


def compare(module: torch.nn.Module, forward, x: Tensor) -> None:
    """Output, and the gradients of x and of every parameter, in float32 to 1e-5 of the largest."""
    dy = random(tuple(x.shape), x.dtype, str(x.device), 3)
    found = []
    for function in (lambda x: module(x.unsqueeze(0)), forward):
        module.zero_grad()
        at = x.clone().requires_grad_()
        y = function(at)
        y = (y[0] if isinstance(y, tuple) else y).view_as(x)
        y.backward(dy)
        found.append([y.detach(), at.grad, *(parameter.grad for parameter in module.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert theirs is not None and ours is not None
        close(ours, theirs)


SIZES = [(7, 4, 2), (9, 1, 1), (5, 3, 3), (3, 16, 1), (1, 5, 2)]  # tokens, experts, chosen: empty ones; one; all


@pytest.mark.sample(4)
@pytest.mark.parametrize(("tokens", "experts", "active"), SIZES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_block_of_qwen3_moe(tokens, experts, active, renormalize) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=12, moe_intermediate_size=10, num_experts=experts, num_experts_per_tok=active,
        norm_topk_prob=renormalize,
    )  # fmt: skip
    module = with_random_parameters(Qwen3MoeSparseMoeBlock(config))
    weights = [module.experts.gate_up_proj.mT, module.experts.down_proj.mT]
    form = (active, moe.Scoring(renormalize), ())
    compare(
        module,
        lambda x: ours_of(x, module.gate.weight, None, weights, form),
        random((tokens, 12), torch.float32, DEVICE),
    )


@pytest.mark.parametrize(("tokens", "experts", "active"), SIZES)
def test_the_block_of_gpt_oss(tokens, experts, active) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(hidden_size=12, intermediate_size=10, num_local_experts=experts, num_experts_per_tok=active)
    module = with_random_parameters(GptOssMLP(config))
    at = module.experts
    at.limit = 1.5  # low enough to be met; older versions do not read it from the config
    weights = [at.gate_up_proj, at.gate_up_proj_bias, at.down_proj, at.down_proj_bias]
    form = (active, FORMS["over-chosen"], (True, Clamp(limit=1.5)))
    compare(
        module,
        lambda x: ours_of(x, module.router.weight, module.router.bias, weights, form),
        random((tokens, 12), torch.float32, DEVICE),
    )
