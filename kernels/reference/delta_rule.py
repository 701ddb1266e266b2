"""The gated delta rule in plain PyTorch: a scan over chunks of tokens (arXiv 2412.06464, 3.3), and its gradients.

Suffixes: T tokens, K key heads, H value heads, C columns of keys, V of values; L tokens of a chunk.
"""

import torch
from torch import Tensor

from rptrain.kernels.batch import CHUNK, Documents
from rptrain.kernels.reference.dense import wide


def gated_delta_rule(
    q_TKC: Tensor,
    k_TKC: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    documents: Documents,
    initial: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The outputs [T, H, V], and the states [documents, H, C, V] after each document's last token, in the wide type.

    `documents` have chunks of `chunk` tokens. The computation of a document does not depend on those beside it.
    """
    dtype, (tokens, heads, columns) = wide(q_TKC.dtype), v_THV.shape
    count, size = len(documents.first) - 1, q_TKC.shape[2]
    # a row of zeros behind the last token stands for the tokens that a chunk lacks
    q, k, v, decay, beta = (
        torch.cat((x.to(dtype), x.new_zeros((1, *x.shape[1:]), dtype=dtype)))
        for x in (q_TKC, k_TKC, v_THV, decay_TH, beta_TH)
    )
    zero = q.new_zeros(heads, size, columns)
    inside = torch.arange(chunk, device=q.device)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    document = documents.document
    begins = documents.starts == documents.cu_seqlens[document]

    sizes = [chunk] * len(document)  # a GPU is not waited for: all chunks are computed, and whole
    if not q.is_cuda:
        sizes = [length for length in (documents.ends - documents.starts).tolist() if length]
    state, outputs, rows, states = zero, [], [], []
    for index, length in enumerate(sizes):
        start, end = documents.starts[index], documents.ends[index]
        row = torch.where(inside[:length] < end - start, start + inside[:length], tokens)
        before = zero if initial is None else initial[document[index]].to(dtype)
        state = torch.where(begins[index], before, state)
        operands = (x[row].transpose(0, 1) for x in (q, k, v, decay, beta))
        out, state = _chunk(*operands, state_HCV=state, lower_LL=lower[:length, :length])
        outputs.append(out.transpose(0, 1))
        rows.append(row)
        states.append(state)
    whole = v.new_zeros(tokens + 1, heads, columns).index_copy(0, torch.cat(rows), torch.cat(outputs))
    last = torch.stack(states)[documents.first[1:] - 1]
    if initial is None:
        initial = zero.expand(count, *zero.shape)
    empty = (documents.first[1:] == documents.first[:-1])[:, None, None, None]
    return whole[:tokens].clone(), torch.where(empty, initial.to(dtype), last)


def _chunk(
    q_KLC: Tensor, k_KLC: Tensor, v_HLV: Tensor, decay_HL: Tensor, beta_HL: Tensor, state_HCV: Tensor, lower_LL: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs [H, L, V] of a chunk, and the state after it."""
    repeats = len(v_HLV) // len(q_KLC)
    q, k = (x.repeat_interleave(repeats, 0) for x in (q_KLC * q_KLC.shape[-1] ** -0.5, k_KLC))
    decay = decay_HL.cumsum(1)
    between = (decay.unsqueeze(2) - decay.unsqueeze(1)).masked_fill(~lower_LL, float("-inf")).exp()
    since_start, until_end = decay.exp().unsqueeze(2), (decay[:, -1:] - decay).exp().unsqueeze(2)
    beta = beta_HL.unsqueeze(2)

    interaction = (beta * (k @ k.mT) * between).tril(-1)
    wanted = beta * (v_HLV - since_start * (k @ state_HCV))
    written = torch.linalg.solve_triangular(interaction, wanted, upper=False, unitriangular=True)
    out = since_start * (q @ state_HCV) + (q @ k.mT * between) @ written
    return out, state_HCV * decay[:, -1].exp()[:, None, None] + (k * until_end).mT @ written


def gated_delta_rule_backward(
    dout_THV: Tensor,
    q_TKC: Tensor,
    k_TKC: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    documents: Documents,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, decay and beta, in their types."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q_TKC, k_TKC, v_THV, decay_TH, beta_TH)]
        out, _ = gated_delta_rule(*leaves, documents=documents)
    return torch.autograd.grad(out, leaves, dout_THV.to(out.dtype))
