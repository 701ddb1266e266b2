"""Micro-batches from lists of document lengths, and buffers that hold NaN until they are written."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.launch import HAS_TRITON

if HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreter import mend

    mend()


@pytest.fixture
def device() -> str:
    """Where Triton kernels run in this process: compiled on a GPU, or interpreted on the CPU."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def nan_filled() -> Iterator[None]:
    """`torch.empty` fills with NaN, so that an output that is not written whole shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def micro_batch() -> Callable[..., MicroBatch]:
    def build(documents: list[list[int]], device: str = "cpu") -> MicroBatch:
        """Each inner list is a row: the lengths of its documents."""
        flat = [length for row in documents for length in row]
        positions = torch.cat([torch.arange(length) for length in flat])
        return MicroBatch(
            sequences=len(documents),
            length=sum(documents[0]),
            positions=positions.to(device),
            labels=torch.full_like(positions, -100).to(device),
            cu_seqlens=torch.tensor([0, *torch.tensor(flat).cumsum(0)], dtype=torch.int32, device=device),
            max_seqlen=max(flat),
            uniform=len({length for row in documents for length in row}) == 1,
        )

    return build
