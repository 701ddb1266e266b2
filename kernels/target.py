"""The GPU that kernels are compiled for and run on: its vendor, its architecture and its features.

Nothing else reads a compute capability: torch reports one for GPUs of AMD too, whose numbers mean other GPUs of NVIDIA.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

Vendor = Literal["nvidia", "amd"]
KB = 1 << 10
MATRIX_CORES = ("gfx942", "gfx1100", "gfx1201")  # of AMD; kernels are compiled for these by tests, and never ran there


@dataclass(frozen=True)
class Target:
    """A vendor's architecture, and the features that kernels and plans ask for."""

    vendor: Vendor
    architecture: int | str  # as Triton names it: 90 for NVIDIA's compute capability 9.0, or "gfx942"
    warp_size: int  # threads
    shared_memory: int  # bytes that a program may have on every card of the architecture
    triton: bool = True  # Triton compiles for it
    matrix_units: bool = False  # Triton multiplies 16-bit matrices with them
    tf32x3: bool = False  # Triton multiplies float32 with them, as three products of tf32
    half_sums: bool = False  # they can sum in float16
    has_fp8: bool = False  # they multiply FP8 (e4m3, as in torch.float8_e4m3fn)
    async_matrix_units: bool = False  # they read operands from shared memory while a program goes on: wgmma, tcgen05
    tma: bool = False  # the tensor memory accelerator copies blocks of matrices
    cudnn: bool = False  # torch has cuDNN's attention
    cutlass_fp8_rows: bool = False  # torch multiplies FP8 with a scale for each row, into bfloat16
    cublas_fp8_rows: bool = False  # cuBLASLt does, since CUDA 12.9, also into float32 and adding to a matrix
    tight_registers: bool = False  # ptxas needs more registers for the same code

    @property
    def name(self) -> str:
        """As compilers name it: "sm_90" or "gfx942"."""
        return f"sm_{self.architecture}" if isinstance(self.architecture, int) else self.architecture

    @property
    def version(self) -> str:
        """As the vendor names it: "9.0" or "gfx942"."""
        if isinstance(self.architecture, str):
            return self.architecture
        major, minor = divmod(self.architecture, 10)
        return f"{major}.{minor}"

    @property
    def described(self) -> str:
        """The version, as part of a sentence."""
        return f"{'compute capability' if self.vendor == 'nvidia' else 'architecture'} {self.version}"


def nvidia(major: int, minor: int) -> Target:
    """The target of a compute capability."""
    capability = major, minor
    large = major in (9, 10)  # Hopper, and Blackwell of data centers
    shared = 227 if large else 163 if capability == (8, 0) else 99 if major >= 8 else 64
    return Target(
        "nvidia",
        10 * major + minor,
        warp_size=32,
        shared_memory=shared * KB,
        triton=major >= 7,
        matrix_units=major >= 8,  # on 7.x Triton (3.6 to 3.9) does not use them
        tf32x3=major >= 8,
        half_sums=major >= 8,
        has_fp8=capability >= (8, 9),
        async_matrix_units=large,
        tma=major >= 9,
        cudnn=True,
        cutlass_fp8_rows=(8, 9) <= capability < (11, 0),
        cublas_fp8_rows=capability == (9, 0),
        tight_registers=major >= 12,
    )


def amd(name: str) -> Target:
    """The target of an architecture such as "gfx942"."""
    warp_size = 64 if name.startswith("gfx9") else 32
    return Target("amd", name, warp_size, shared_memory=64 * KB, matrix_units=name in MATRIX_CORES)


def named(architecture: int | str) -> Target:
    """The target of an architecture as Triton names it."""
    return amd(architecture) if isinstance(architecture, str) else nvidia(*divmod(architecture, 10))


SMALL = nvidia(8, 6)  # what kernels are launched for without a GPU: in Triton's interpreter


def read(device: torch.device | str | int | None = None) -> Target:
    """The target of a GPU, by default of the current one."""
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return amd(properties.gcnArchName.partition(":")[0])
    return nvidia(properties.major, properties.minor)


@cache
def target_of(device: torch.device) -> Target:
    """The target of kernels on this device."""
    return read(device) if device.type == "cuda" else SMALL
