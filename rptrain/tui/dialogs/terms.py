"""Terms on the screens that a newcomer does not know, which their help explains."""

_BUBBLE = ("bubble", "share of the time in which devices do not compute")
_DEAD = ("dead", "the process is gone and wrote no last record")

OF_PLAN = (
    _BUBBLE,
    ("F fused B", "stages: forward, forward and backward, backward"),
    ("rounds", "groups of micro-batches that pass all stages in turn"),
    ("2 generations", "async: weights in use, and those being updated"),
)
OF_RUN = (
    ("▀ █ ▄", "F: forward, FB: forward and backward, B: backward"),
    ("F0-7 · 3", "forward of the layers 0 to 7, of micro-batch 3"),
    ("N M MR R", "devices, micro-batches per step and round, replicas"),
    ("82%", "after a device: share of time in which it computes"),
    ("↑ ↓ used", "copies to and from the GPU; GPU utilization"),
    _BUBBLE,
    ("of peak speed", "roofline time of a step over its measured time"),
    ("one step late", "async: gradients use weights one step old"),
    ("queue", "steps that the optimizer has not applied yet"),
    _DEAD,
)
OF_RUNS = (_DEAD,)
