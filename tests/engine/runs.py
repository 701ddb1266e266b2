"""Small engine runs that tests compare."""

from dataclasses import replace
from functools import partial

import torch

from rptrain.engine.engine import Devices, Engine
from rptrain.engine.footprint import footprint
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.optim.loss_scale import UNSCALED
from rptrain.engine.optimizer import Optimizer
from rptrain.engine.recorder import Observers
from rptrain.kernels.quant import Quantized
from rptrain.models.families.registry import build
from rptrain.models.transforms.balance import balanced
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.half_sums import with_half_sums
from rptrain.models.transforms.lora import with_lora
from rptrain.models.transforms.quantize import with_base
from rptrain.schedule.plan import Plan

from ..layouts import layout_of

BETAS = (0.9, 0.95)


def make_store(
    cfg,
    dtype,
    *,
    asynchronous,
    wide_grad=False,
    replicas=1,
    lock=False,
    seed=0,
    moments="fp32",
    frozen=(),
    lora=None,
    base="bf16",
    fp8=False,
    half_sums=False,
    share=None,
):
    """A store with random weights that depend on the seed and each parameter's name alone; `lora` is a LoRA."""
    spec = balanced(build(cfg), cfg.get("router_aux_loss_coef", 0.0))
    spec = with_base(with_lora(spec, lora), base) if lora else freeze(spec, frozen)
    spec = with_fp8(spec) if fp8 else spec
    spec = with_half_sums(spec) if half_sums else spec
    kind = {"generations": 1 + asynchronous, "wide_grad": wide_grad, "replicas": replicas, "moments": moments}
    kind |= {"share": share}
    store = ModelStore(spec, layout_of(dtype, **kind), lock=lock)
    for index, unit in enumerate(spec.units):
        for param in unit.params:
            name = unit.name.removesuffix(".trained") + param.name
            generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
            values = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.15
            held = store.stored_view(index, param.name)
            if isinstance(held, Quantized):
                held.write(values.mT if param.transposed else values)
            else:
                held.copy_(1 + values if param.std is None else values)
    store.loaded()
    return store


def checkpoint_tensors(store):
    """The newest weights by checkpoint name, copied."""
    tensors = {}
    for index, unit in enumerate(store.spec.units):
        for param in unit.params:
            rows = store.view(index, param.name).split([part.rows for part in param.parts])
            tensors |= {part.key: piece.clone() for part, piece in zip(param.parts, rows, strict=True)}
    return tensors


def run(
    cfg,
    batches,
    plan,
    *,
    dtype=torch.float32,
    asynchronous,
    store=None,
    device="cpu",
    frozen=(),
    lora=None,
    base="bf16",
    fp8=False,
    half_sums=False,
    **options,
):
    """Trains on `batches`; returns (losses, norms, final weights, spans of the trace)."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if store is not None:
        return train(store, batches, plan, asynchronous=asynchronous, device=device, **options)
    kind = {"wide_grad": plan.rounds > 1, "replicas": plan.replicas, "lock": device == "cuda"}
    kind |= {"frozen": frozen, "lora": lora, "base": base, "fp8": fp8, "half_sums": half_sums}
    with make_store(cfg, dtype, asynchronous=asynchronous, **kind) as store:
        return train(store, batches, plan, asynchronous=asynchronous, device=device, **options)


def engine_of(
    store,
    plan,
    *,
    tokens,
    asynchronous=True,
    device="cpu",
    probe=None,
    trace=False,
    meter=None,
    applied=0,
    loss_scale=UNSCALED,
    fp16_accumulation=False,
    watched=False,
    shared=None,
    **options,
):
    """An engine for steps of `plan`, whose sizes the store's layout gets here."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    sizes = {"sequences": 1, "length": tokens, "micro_batches": plan.micro_batches, "round_size": plan.round_size}
    layout = replace(store.layout, **sizes, half_sums=fp16_accumulation)
    assert (layout.asynchronous, layout.grad_dtype) == (asynchronous, store.layout.grad_dtype)
    store.layout = layout
    return Engine(
        store,
        plan,
        Devices([f"{device}:{i}" for i in range(plan.devices)], footprint(store.spec, plan.stages, layout, plan.width)),
        Optimizer(betas=BETAS, applied=applied, loss_scale=loss_scale, **options),
        observers=Observers(trace, meter, watched, probe),
        partners=shared,
    )


def train(store, batches, plan, *, rate=1e-3, lagged=True, **options):
    with engine_of(store, plan, tokens=batches[0].sequences * batches[0].length, **options) as engine:
        losses, steps = [], []
        for batch in batches:
            loss = engine.forward_backward(batch)
            steps.append(engine.step(rate))
            losses.append(loss.result if lagged else partial(float, loss.result()))
        engine.synchronize()
        spans = [s for i in range(len(batches)) for s in (engine.trace.take(i) if engine.trace else [])]
        spans = [span for span in spans if span.micro_batch is not None]
        values = [loss() for loss in losses], [step.result().grad_norm for step in steps]
    return *values, checkpoint_tensors(store), spans
