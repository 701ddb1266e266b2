"""Process-wide settings for bitwise reproducible results on any number of workers."""

import os
from typing import Any

import torch
import torch.utils.deterministic

deterministic: Any = torch.utils.deterministic
matmul: Any = torch.backends.cuda.matmul


class Reproducible:
    """Applies the settings when created; `restore` puts the previous ones back.

    CPU operations use one thread, because sums differ between one thread and two. On CUDA, the backward pass of
    attention adds in a fixed order only with torch's deterministic algorithms; these need a fixed cuBLAS workspace,
    and their filling of new tensors with NaN is turned off. With `fp16_accumulation`, products of float16 matrices on
    CUDA are accumulated in float16.
    """

    def __init__(self, *, cuda: bool, fp16_accumulation: bool = False) -> None:
        self._threads = torch.get_num_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._fill = deterministic.fill_uninitialized_memory
        self._fp16_accumulation = matmul.allow_fp16_accumulation
        torch.set_num_threads(1)
        matmul.allow_fp16_accumulation = fp16_accumulation
        if cuda:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            deterministic.fill_uninitialized_memory = False

    def restore(self) -> None:
        torch.set_num_threads(self._threads)
        if torch.are_deterministic_algorithms_enabled() != self._deterministic:  # the call imports torch's compiler
            torch.use_deterministic_algorithms(self._deterministic)
        matmul.allow_fp16_accumulation = self._fp16_accumulation
        deterministic.fill_uninitialized_memory = self._fill
