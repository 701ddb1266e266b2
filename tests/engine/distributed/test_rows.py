"""Gradient rows of the embedding that processes exchange take the memory that is planned."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rptrain.engine.distributed.rows import SharedRowGradients
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.embedding_grads import CpuRows

from ...layouts import layout_of
from .. import plain, runs


@pytest.mark.parametrize("tokens", [6, 200])
@pytest.mark.parametrize("rank", [0, 2])
def test_takes_what_is_planned(rank, tokens):
    """Also where each group has every token, and where all tokens differ."""
    share = Share(rank, 3, 4)
    with (
        ThreadPoolExecutor(1) as pool,
        runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=False, wide_grad=True, share=share) as store,
    ):
        layout = layout_of(torch.bfloat16, tokens=tokens, share=share)
        gradients = SharedRowGradients(store.units[0], store.spec, layout, CpuRows(pool, 1), channel=None)
        ids = torch.arange(4 * tokens).view(4, -1) % plain.CONFIG["vocab_size"]
        gradients.begin(ids, share.groups, range(4))
        kept = [gradients._buffer, gradients._rows, gradients._places, gradients._sources]
        kept += [gradients._sorted, gradients._occurs, *gradients._sent]
        planned = SharedRowGradients.shared_nbytes(store.spec, layout)
        assert sum(tensor.nbytes for tensor in kept) == planned
        for rank, trees in gradients._trees.items():
            received = sum(len(gradients._rows_for(share.rank, tree)) for tree in trees) if rank != share.rank else 0
            assert len(gradients._sums) + received <= len(gradients._buffer)
