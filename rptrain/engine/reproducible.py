"""Process-wide settings under which the same inputs give the same bits, whatever the number of workers."""

import os
from typing import Any

import torch
import torch.utils.deterministic

deterministic: Any = torch.utils.deterministic


class Reproducible:
    """Sets them when made, and puts back what was there on `restore`.

    One thread for each CPU operation: sums differ between one thread and two. On CUDA, attention's backward adds in
    a fixed order only while torch's deterministic algorithms are asked for; the matrix library's workspace must then
    be of a fixed size, and filling every new tensor with NaN, which comes with it, is turned off.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._threads = torch.get_num_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._fill = deterministic.fill_uninitialized_memory
        torch.set_num_threads(1)
        if cuda:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            deterministic.fill_uninitialized_memory = False

    def restore(self) -> None:
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._deterministic)
        deterministic.fill_uninitialized_memory = self._fill
