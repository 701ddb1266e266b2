"""The float16 loop that the engine is held against: the model's layers one after the other, no engine, no threads."""

import math

import numpy as np
import torch

from rptrain.kernels.batch import MicroBatch
from rptrain.models.layers.rope import RotaryTables

EPS = 1e-8


class Scale:
    """The loss scale after each step; `scales[0]` is what training begins with."""

    def __init__(self, first, growth_steps):
        self.scales, self.growth_steps, self.good = [first], growth_steps, 0

    def step(self, used, skipped):
        scale = self.scales[-1]
        if skipped:
            scale, self.good = min(scale, used / 2), 0
        elif used == scale:
            self.good += 1
            if self.good == self.growth_steps:
                scale, self.good = 2 * scale, 0
        self.scales.append(scale)


def micro_batch(spec, batch, m):
    lengths, tokens = batch.documents[m], batch.sequences * batch.length
    uniform = min(lengths) == max(lengths)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    padded = torch.full((17 if not uniform else len(ends),), tokens, dtype=torch.int32)
    padded[: len(ends)] = ends
    rotations = RotaryTables(spec.rotaries, torch.float32, torch.device("cpu")).at(batch.positions[m])
    longest = lengths[0] if uniform else batch.length
    return MicroBatch(
        batch.sequences, batch.length, batch.positions[m], batch.labels[m], padded, longest, uniform, rotations
    )


def gradients(spec, params, batch, scale):
    """(losses of the micro-batches, rounded gradients by unit and name) of `scale` times the loss's sum."""
    sums = [{name: torch.zeros(p.shape) for name, p in unit.items()} for unit in params]
    rows = torch.zeros(params[0]["embed"].shape)
    losses = []

    def merged(units, layer):
        return {name: tensor for unit in layer.units for name, tensor in units[unit].items()}

    for m, ids in enumerate(batch.input_ids):
        mb = micro_batch(spec, batch, m)
        h, kept = params[0]["embed"][ids], []
        for layer in spec.layers:
            h, saved = layer.forward_saved(merged(params, layer), h, mb)
            kept.append(saved)
        loss, dy = spec.head.loss_backward(merged(params, spec.head), merged(sums, spec.head), h, mb, scale)
        losses.append(loss)
        for layer, saved in zip(reversed(spec.layers), reversed(kept), strict=True):
            dy = layer.backward(merged(params, layer), merged(sums, layer), saved, dy, mb)
        rows.index_add_(0, ids, dy.float())
    grads = rounded(spec, sums)
    grads[0]["embed"] = (grads[0]["embed"].float() + rows).half()
    return torch.stack(losses), grads


def rounded(spec, tensors):
    """Copies in float16, or in their parameters' own types, by unit and name."""
    return [
        {param.name: of_unit[param.name].to(param.dtype_in(torch.float16), copy=True) for param in unit.params}
        for unit, of_unit in zip(spec.units, tensors, strict=True)
    ]


def adam(master, moments, grad, factor, rate, decay, betas, step):
    """The arithmetic of adam.c in torch, on one parameter."""
    m, v = moments
    g = grad.float() * factor
    m.mul_(betas[0]).add_(g * (1 - betas[0]))
    v.mul_(betas[1]).add_(g.square() * (1 - betas[1]))
    root = torch.from_numpy(np.sqrt(v.numpy())) * (1 - betas[1] ** step) ** -0.5 + EPS
    master.mul_(1 - rate * decay).sub_(m * (rate / (1 - betas[0] ** step)) / root)


def train(spec, weights, batches, *, rate, betas, delayed, scale, growth_steps, weight_decay, max_grad_norm):
    """Returns (losses, norms, skipped, scales that steps used, masters). `weights` are by unit and name."""
    masters = [{name: w.to(torch.float32, copy=True) for name, w in unit.items()} for unit in weights]
    moments = [{name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in unit.items()} for unit in masters]
    versions, following = [weights], Scale(scale, growth_steps)
    losses, norms, skipped, used, applied = [], [], [], [], 0
    for n, batch in enumerate(batches):
        version = max(n - 1, 0) if delayed else n
        used.append(following.scales[version])
        power = 2.0 ** -math.floor(math.log2(batch.supervised))
        found, grads = gradients(spec, versions[version], batch, power * used[-1])
        losses.append(found.double().sum().item() / batch.supervised)
        factor = 1 / (power * used[-1] * batch.supervised)
        norms.append(math.sqrt(sum(g.double().square().sum().item() for u in grads for g in u.values())) * factor)
        skipped.append(not math.isfinite(norms[-1]))
        following.step(used[-1], skipped[-1])
        if not skipped[-1]:
            applied += 1
            factor *= min(1.0, max_grad_norm / (norms[-1] + 1e-6))
            for unit, states, found, parts in zip(masters, moments, grads, spec.units, strict=True):
                for param in parts.params:
                    name, decay = param.name, weight_decay if param.decay else 0.0
                    adam(unit[name], states[name], found[name], factor, rate, decay, betas, applied)
        versions.append(rounded(spec, masters))
    return losses, norms, skipped, used, masters
