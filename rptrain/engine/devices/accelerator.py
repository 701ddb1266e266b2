"""What a GPU of this machine is: its model, vendor, architecture and features."""

from dataclasses import dataclass
from typing import Any

import torch

from rptrain.kernels import target
from rptrain.kernels.target import Target
from rptrain.utils.nvml import Driver


@dataclass(frozen=True)
class Accelerator:
    """A model of GPU: those that are equal are of one model."""

    name: str  # the driver's
    target: Target  # vendor, architecture and features

    def __str__(self) -> str:
        return f"{self.name}, {self.target.described}"


def accelerator(device: str | int) -> Accelerator:
    """A GPU that torch can use, such as "cuda:0" or 0."""
    properties: Any = torch.cuda.get_device_properties(device)
    return Accelerator(properties.name, target.read(device))


def listed(driver: Driver) -> list[Accelerator]:
    """The GPUs that NVIDIA's driver lists, whether or not torch can use them."""
    return [Accelerator(gpu.name, target.nvidia(*gpu.capability)) for gpu in driver.gpus()]
