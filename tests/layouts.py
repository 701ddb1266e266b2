"""Layouts of steps for tests that need only some of their sizes."""

import torch

from rptrain.engine.memory.step_layout import StepLayout


def layout_of(dtype=torch.float32, *, generations=1, wide_grad=False, replicas=1, tokens=32, **options):
    """A step of micro-batches of one sequence each: of one, or if gradients are partial sums of several rounds."""
    micro_batches = max(2, replicas) if wide_grad else 1
    sizes = {"micro_batches": micro_batches, "round_size": 1, "replicas": replicas}
    return StepLayout(1, tokens, dtype=dtype, asynchronous=generations == 2, **sizes, **options)
