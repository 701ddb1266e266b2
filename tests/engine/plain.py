"""The training loop that the engine is held against: plain PyTorch with autograd, one device, no engine.

Its model is a Llama written for reading: batch of rows, one mask, whole logits.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

from rptrain.data.batch import Batch

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def config(**changes):
    return {**CONFIG, **changes}


def make_batches(count, micro_batches=4, rows=2, length=16, vocab=61, seed=0):
    """Random batches of packed documents; some labels are ignored, and each batch has another count of them."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(vocab, (micro_batches, rows * length), generator=generator)
        positions, labels, documents = [], [], []
        for m in range(micro_batches):
            lengths = []
            for _ in range(rows):
                cut = int(torch.randint(1, length, (1,), generator=generator))
                lengths += [cut, length - cut]
            documents.append(tuple(lengths))
            positions.append(torch.cat([torch.arange(n) for n in lengths]))
            shifted = torch.cat([ids[m, 1:], ids[m, :1]])
            ends = torch.tensor(lengths).cumsum(0) - 1
            shifted[ends] = -100
            shifted[torch.rand(rows * length, generator=generator) < 0.3] = -100
            labels.append(shifted)
        stacked = torch.stack(labels)
        batches.append(
            Batch(
                input_ids=ids,
                positions=torch.stack(positions),
                labels=stacked,
                documents=tuple(documents),
                rows=rows,
                length=length,
                supervised=int((stacked != -100).sum()),
            )
        )
    return batches


def uniform(batch):
    """The same tokens with every row one document."""
    count = len(batch.input_ids)
    positions = torch.arange(batch.length).repeat(count, batch.rows)
    return dataclasses.replace(batch, positions=positions, documents=((batch.length,) * batch.rows,) * count)


def loss(weights, cfg, batch):
    """Mean cross-entropy over the supervised tokens of a whole batch; `weights` by checkpoint name."""
    total = 0.0
    for ids, positions, labels in zip(batch.input_ids, batch.positions, batch.labels, strict=True):
        logits = forward(weights, cfg, ids.view(batch.rows, -1), positions.view(batch.rows, -1))
        total = total + F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return total / batch.supervised


def forward(weights, cfg, ids, positions):
    heads, keys, size = cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"]
    length = ids.shape[1]
    index = torch.arange(length)
    start = index - positions  # of each token's document
    mask = (index[None, None, :] <= index[None, :, None]) & (index[None, None, :] >= start[:, :, None])
    x = weights["model.embed_tokens.weight"][ids]
    frequencies = 1 / cfg["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)  # as published
    angles = torch.cat([positions[..., None] * frequencies.to(x.dtype)] * 2, -1)[:, None]
    scale = cfg.get("rope_parameters", {}).get("attention_factor", 1)  # of YaRN; the frequencies stay as they are

    def norm(x, name):
        return weights[name] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + cfg["rms_norm_eps"])

    def rotate(x):
        half = x.shape[-1] // 2
        return scale * (x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin())

    for i in range(cfg["num_hidden_layers"]):
        at = f"model.layers.{i}."

        def project(h, name, count, at=at):
            return (h @ weights[f"{at}self_attn.{name}_proj.weight"].T).unflatten(-1, (count, size)).transpose(1, 2)

        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = rotate(project(h, "q", heads)), rotate(project(h, "k", keys)), project(h, "v", keys)
        k, v = (t.repeat_interleave(heads // keys, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(~mask[:, None], -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + attended @ weights[f"{at}self_attn.o_proj.weight"].T
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if cfg["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T


def train(weights, cfg, batches, rates, *, delayed, betas, weight_decay=0.0, max_grad_norm=0.0):
    """Returns (losses, gradient norms). Changes `weights` in place.

    delayed: g_t = grad L(w_{t-2}), w_t = Adam(w_{t-1}, g_t), w_{-1} = w_0. Otherwise g_t = grad L(w_{t-1}).
    """
    for tensor in weights.values():
        tensor.requires_grad_()
    decayed = [w for name, w in weights.items() if "norm" not in name]
    plain = [w for name, w in weights.items() if "norm" in name]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=betas,
    )
    before = {name: w.detach().clone() for name, w in weights.items()}  # w_{t-2}
    losses, norms = [], []
    for batch, rate in zip(batches, rates, strict=True):
        at = {name: w.clone().requires_grad_() for name, w in before.items()} if delayed else weights
        value = loss(at, cfg, batch)
        gradients = torch.autograd.grad(value, list(at.values()))
        before = {name: w.detach().clone() for name, w in weights.items()}
        for w, g in zip(weights.values(), gradients, strict=True):
            w.grad = g
        norms.append(torch.nn.utils.get_total_norm([w.grad for w in weights.values()]).item())
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(list(weights.values()), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(value.item())
    return losses, norms
