"""The training loop that the engine is held against: plain PyTorch with autograd, one device, no engine.

Its model is a Llama written for reading: batch of rows, one mask, whole logits. With other weights it is a Qwen2,
a Qwen3-MoE or a GPT-OSS: norms of queries and keys, biases, sinks and experts are there if their weights are.
"""

import dataclasses
import math
from functools import partial

import torch
import torch.nn.functional as F

from rptrain.kernels.batch import Batch
from rptrain.models.families.registry import MODEL_TYPES
from tests.families import FAMILIES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
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
QWEN2 = CONFIG | {"architectures": ["Qwen2ForCausalLM"]}


def of_family(kind: str):
    """A config with the settings of a family in tests/families.py. The plain loop computes few families."""
    return CONFIG | {"architectures": [MODEL_TYPES[kind]]} | FAMILIES[kind].engine


QWEN3_MOE = of_family("qwen3_moe")
GPT_OSS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GLM4_MOE = of_family("glm4_moe")  # and MINIMAX_M2: not for the plain loop
MINIMAX_M2 = of_family("minimax_m2")


def config(**changes):
    return {**CONFIG, **changes}


def make_batches(count, micro_batches=4, length=16, vocab=61):
    """Random batches of packed documents; some labels are ignored, and each batch has another count of them."""
    generator, rows = torch.Generator().manual_seed(0), 2
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
                sequences=rows,
                length=length,
                supervised=int((stacked != -100).sum()),
            )
        )
    return batches


def uniform(batch):
    """The same tokens with every row one document."""
    count = len(batch.input_ids)
    positions = torch.arange(batch.length).repeat(count, batch.sequences)
    return dataclasses.replace(batch, positions=positions, documents=((batch.length,) * batch.sequences,) * count)


def loss(weights, cfg, batch):
    """Mean cross-entropy over the supervised tokens of a whole batch; `weights` by checkpoint name."""
    total = 0.0
    for ids, positions, labels in zip(batch.input_ids, batch.positions, batch.labels, strict=True):
        logits = forward(weights, cfg, ids.view(batch.sequences, -1), positions.view(batch.sequences, -1))
        total = total + F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return total / batch.supervised


def auxiliary(weights, cfg, batch):
    """The routers' auxiliary loss of each layer and micro-batch: its mean."""
    found = []
    for ids, positions, labels, lengths in zip(
        batch.input_ids, batch.positions, batch.labels, batch.documents, strict=True
    ):
        real = torch.cat([(part >= 0).any().expand(len(part)) for part in labels.split(list(lengths))])
        routed = []
        forward(weights, cfg, ids.view(batch.sequences, -1), positions.view(batch.sequences, -1), routed)
        for logits in routed:
            shares = logits.flatten(0, 1)[real].softmax(-1)
            chosen = torch.zeros_like(shares).scatter(1, shares.topk(cfg["num_experts_per_tok"]).indices, 1.0)
            found.append(shares.shape[1] * (chosen.mean(0) * shares.mean(0)).sum())
    return sum(found) / len(found)


def forward(weights, cfg, ids, positions, routed=None):
    """`routed` is a list that takes each router's logits."""
    heads, keys, size = cfg["num_attention_heads"], cfg["num_key_value_heads"], cfg["head_dim"]
    length = ids.shape[1]
    index = torch.arange(length)
    start = index - positions  # of each token's document
    mask = (index[None, None, :] <= index[None, :, None]) & (index[None, None, :] >= start[:, :, None])
    near = index[None, :] > index[:, None] - cfg.get("sliding_window", length)
    x = F.embedding(ids, weights["model.embed_tokens.weight"], cfg.get("pad_token_id"))
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

        def project(h, name, at=at):
            y = h @ weights[f"{at}{name}.weight"].T + weights.get(f"{at}{name}.bias", 0)
            if f"{at}{name}.lora_A.weight" in weights:
                low, high = (weights[f"{at}{name}.lora_{ab}.weight"] for ab in "AB")
                y = y + cfg["lora_scale"] * (h @ low.T @ high.T)
                if (length := weights.get(f"{at}{name}.lora_magnitude_vector")) is not None:
                    bias = weights.get(f"{at}{name}.bias", 0)
                    whole = weights[f"{at}{name}.weight"] + cfg["lora_scale"] * high @ low
                    y = (y - bias) * length / whole.detach().norm(dim=1) + bias
            return y

        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (
            project(h, f"self_attn.{name}_proj").unflatten(-1, (count, size)).transpose(1, 2)
            for name, count in (("q", heads), ("k", keys), ("v", keys))
        )
        if f"{at}self_attn.q_norm.weight" in weights:
            q, k = (norm(t, f"{at}self_attn.{name}_norm.weight") for t, name in ((q, "q"), (k, "k")))
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // keys, 1) for t in (k, v))
        seen = mask & near if i % 2 == 0 else mask
        scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(~seen[:, None], -math.inf)
        if f"{at}self_attn.sinks" in weights:
            sinks = weights[f"{at}self_attn.sinks"][None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        attended = (scores.softmax(-1)[..., :length] @ v).transpose(1, 2).flatten(2)
        x = x + project(attended, "self_attn.o_proj")
        h = norm(x, f"{at}post_attention_layernorm.weight")
        if f"{at}mlp.gate.weight" in weights:
            logits = project(h, "mlp.gate")
            shares = logits.softmax(-1)  # of all experts
            x = x + chosen_experts(h, shares, partial(expert, weights, f"{at}mlp.experts.", cfg), cfg)
        elif f"{at}mlp.router.weight" in weights:
            logits = project(h, "mlp.router")
            lowest = logits.topk(cfg["num_experts_per_tok"]).values[..., -1:]
            shares = logits.masked_fill(logits < lowest, -math.inf).softmax(-1)  # of those that are chosen
            x = x + chosen_experts(h, shares, partial(clamped_expert, weights, f"{at}mlp.experts.", cfg), cfg)
        else:
            logits = None
            gate, up = (project(h, f"mlp.{name}_proj") for name in ("gate", "up"))
            x = x + project(F.silu(gate) * up, "mlp.down_proj")
        if routed is not None and logits is not None:
            routed.append(logits)
    head = "model.embed_tokens.weight" if cfg["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T


def chosen_experts(h, shares, compute, cfg):
    """The sum over the experts with the largest shares, each computed for all tokens."""
    values, chosen = shares.topk(cfg["num_experts_per_tok"])
    kept = torch.zeros_like(shares).scatter(-1, chosen, values)
    return sum(kept[..., e, None] * compute(h, e) for e in range(shares.shape[-1]))


def expert(weights, at, cfg, h, e):
    gate_up = torch.cat([h @ weights[f"{at}{e}.{name}_proj.weight"].T for name in ("gate", "up")], -1)
    gate, up = (gate_up + adapter(weights, f"{at}base_layer.", cfg, h, e)).chunk(2, -1)
    h = F.silu(gate) * up
    return h @ weights[f"{at}{e}.down_proj.weight"].T + adapter(weights, at, cfg, h, e)


def clamped_expert(weights, at, cfg, h, e):
    gate_up = h @ weights[f"{at}gate_up_proj"][e] + weights[f"{at}gate_up_proj_bias"][e]
    gate_up = gate_up + adapter(weights, f"{at}base_layer.", cfg, h, e)
    limit = cfg["swiglu_limit"]
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    product = (up + 1) * gate * torch.sigmoid(cfg["swiglu_alpha"] * gate)
    added = adapter(weights, at, cfg, product, e)
    return product @ weights[f"{at}down_proj"][e] + weights[f"{at}down_proj_bias"][e] + added


def adapter(weights, at, cfg, h, e):
    """What that of expert e adds to its product with h, where all of `gate_up_proj` and `down_proj` have one."""
    if f"{at}lora_A.weight" not in weights:
        return 0
    count = cfg.get("num_experts") or cfg["num_local_experts"]
    low = weights[f"{at}lora_A.weight"].unflatten(0, (count, -1))[e]
    high = weights[f"{at}lora_B.weight"].unflatten(1, (-1, count))[..., e]
    return cfg["lora_scale"] * h @ low.T @ high.T


def train(everything, cfg, batches, rates, *, delayed, betas, weight_decay=0.0, max_grad_norm=0.0, frozen=()):
    """Returns (losses, gradient norms). Changes `everything`, weights by name, in place, but for those in `frozen`.

    delayed: g_t = grad L(w_{t-2}), w_t = Adam(w_{t-1}, g_t), w_{-1} = w_0. Otherwise g_t = grad L(w_{t-1}).
    """
    weights = {name: tensor for name, tensor in everything.items() if name not in frozen}
    for tensor in weights.values():
        tensor.requires_grad_()
    plain = [w for name, w in weights.items() if any(word in name for word in ("norm", "bias", "sinks", "magnitude"))]
    decayed = [w for w in weights.values() if all(w is not other for other in plain)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=betas,
    )
    before = {name: w.detach().clone() for name, w in weights.items()}  # w_{t-2}
    losses, norms = [], []
    for batch, rate in zip(batches, rates, strict=True):
        at = {name: w.clone().requires_grad_() for name, w in before.items()} if delayed else weights
        value = loss(everything | at, cfg, batch)
        objective = value
        if coefficient := cfg.get("router_aux_loss_coef"):
            objective = value + coefficient * auxiliary(everything | at, cfg, batch)
        gradients = torch.autograd.grad(objective, list(at.values()))
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
