"""The dtypes of weights, by the names that configs and options use."""

import torch

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
