"""Compiles the kernels for GPUs that are not there, and reads what they use: a program of its own.

python -m tests.kernels.compiling: reads JSON lines with the arguments of `compiled_variants`, and answers each with a
JSON line of its result. It must not share a process with Triton's interpreter.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rptrain.kernels.launch import FIXED_OPTIONS
from rptrain.kernels.target import named
from rptrain.kernels.toolchain_errors import TritonError

SHARED = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}  # bytes of a block
ARCHITECTURES = tuple(SHARED)
AMD = ("gfx942", "gfx1100", "gfx1201")
FP8_CARDS = (89, 90, 120)
SUMS = re.compile(r"mma\S*\.m\d+n\d+k\d+(?:\.row\.col)?\.(\w+)")
ADDS = re.compile(r"\badd(?:\.\w+)*\.f32(?:x2)?\b")


@dataclass(frozen=True)
class Variant:
    """A kernel with its argument types ("*bf16", "i32", "fp32"), constants and launch options.

    `architectures` are those it is meant for; types of bf16 become fp16 on 75, which has no bf16 in hardware. `stack`
    is what a thread may spill, in bytes: more than none only where it does with any tiles. `half_sums`: whether matrix
    units must sum in float16. `promoted`: whether what they sum must be added to float32 registers by other
    instructions, in a kernel without other additions.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)  # num_warps, num_stages
    architectures: tuple[int | str, ...] = (*ARCHITECTURES, *AMD)
    stack: int = 0
    half_sums: bool = False
    promoted: bool = False


def _compile(variant: Variant, architecture: int | str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    types = {name: variant.signature.get(name, "constexpr") for name in kernel.arg_names}
    if architecture == 75:
        types = {name: kind.replace("bf16", "fp16") for name, kind in types.items()}
    pointers = [i for i, name in enumerate(kernel.arg_names) if types[name].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn=kernel, signature=types, constexprs=variant.constants, attrs=aligned)
    target = GPUTarget("hip" if isinstance(architecture, str) else "cuda", architecture, named(architecture).warp_size)
    return triton.compile(source, target=target, options=FIXED_OPTIONS | variant.options)


def compiled(variant: Variant, architecture: int) -> dict[str, Any]:
    """Registers, stack and shared bytes of a variant."""
    import triton

    result = _compile(variant, architecture)
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        report = subprocess.run([binaries / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout)
    assert usage is not None, report.stdout + report.stderr
    return {
        "kernel": variant.kernel.__name__,
        "architecture": architecture,
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "stack_allowed": variant.stack,
        "shared": result.metadata.shared,
        "shared_allowed": SHARED[architecture],
        "sums": sorted(set(SUMS.findall(result.asm["ptx"]))),  # types in which matrix units sum
        "half_sums": variant.half_sums,
        "adds": len(ADDS.findall(result.asm["ptx"])),
        "promoted": variant.promoted,
    }


def compiled_for_amd(variant: Variant, architecture: str) -> dict[str, Any]:
    """Threads and shared bytes of a variant, and what Triton's backend says if it cannot compile it or has no such
    option; registers are not looked at.
    """
    from triton.backends.amd.compiler import HIPOptions

    usage = {"kernel": variant.kernel.__name__, "architecture": architecture, "error": None}
    unknown = (FIXED_OPTIONS | variant.options).keys() - HIPOptions.__dataclass_fields__.keys()
    if unknown:
        return usage | {"error": f"unknown options: {', '.join(sorted(unknown))}"}
    try:
        metadata = _compile(variant, architecture).metadata
    except (RuntimeError, TritonError) as error:
        return usage | {"error": f"{type(error).__name__}: {error}"}
    return usage | {"shared": metadata.shared, "threads": metadata.num_warps * metadata.warp_size}


def compiled_variants(
    architecture: int | str, operations: list[str], once: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    """Compile all variants of tests/kernels/variants_OPERATION.py for an architecture such as 89 or "gfx942", or with
    `once` the first of each kernel. Returns the names of all kernels, and what each variant uses.
    """
    modules = [importlib.import_module(f"tests.kernels.variants_{operation}") for operation in operations]
    variants: list[Variant] = [variant for module in modules for variant in module.VARIANTS]
    compile_one: Any = compiled_for_amd if isinstance(architecture, str) else compiled
    done: set[Any] = set()
    found = []
    for variant in variants:
        if architecture in variant.architectures and not (once and variant.kernel in done):
            found.append(compile_one(variant, architecture))
            done.add(variant.kernel)
    return sorted({variant.kernel.__name__ for variant in variants}), found


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(compiled_variants(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
