"""Tokens per second of conversations with models on a GPU, streamed to it and on the CPU, beside what was expected.

python -m benchmarks.placements OUT.json

The weights are zeros: what is computed does not depend on them, and no model has to be there. An answer of TOKENS
tokens is drawn after a prompt of PROMPT tokens; the first answer, which compiles kernels, is not counted.
"""

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.commit import commit
from rptrain.inference.chat import Speaker
from rptrain.inference.free_memory import free_memory
from rptrain.inference.model import Model
from rptrain.inference.placement import Kind, Sizes, choose, speeds
from rptrain.inference.settings import AnswerSettings
from rptrain.inference.weights import placed
from rptrain.models.families import registry
from rptrain.models.locate import locate, read_config
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.models.transforms.quantize import with_base

CASES = (
    *(("qwen3-1.7b", base) for base in ("bf16", "nf4")),
    *(("llama-3.1-8b", base) for base in ("bf16", "nf4")),
    ("gpt-oss-20b", "mxfp4"),
)
PROMPT = 64
TOKENS: dict[Kind, int] = {"gpu": 48, "streamed": 12, "cpu": 6}


def spec_of(preset: str, base: str) -> ModelSpec:
    """A model with its base in this format; one that is not in bf16 has adapters beside it."""
    spec = registry.build(read_config(locate(preset)))
    return spec if base == "bf16" else with_base(with_lora(spec, LoRA(r=8)), base)


def measured(model: Model, sizes: Sizes) -> Iterator[tuple[Kind, float]]:
    """The tokens per second of each placement that fits."""
    for kind in speeds(sizes, free_memory()):
        gc.collect()
        torch.cuda.empty_cache()
        placement = choose(sizes, free_memory(), kind)
        speaker = Speaker(model.spec, placed(model, placement, print), lambda: 1 << 40)
        settings = AnswerSettings(temperature=0, max_new_tokens=TOKENS[kind])
        for start in (0, 1):  # another prompt, which the cache does not know
            for _ in speaker.stream(range(start, start + PROMPT), settings, set(), 0):
                pass
        assert speaker.speed is not None and speaker.speed.tokens_per_second is not None
        yield kind, speaker.speed.tokens_per_second


def main() -> None:
    """Measures all cases, and writes them after each one."""
    room = free_memory()
    found: dict[str, Any] = {"commit": commit(), "torch": torch.__version__, "room": asdict(room), "cases": []}
    for preset, base in CASES:
        spec = spec_of(preset, base)
        model = Model(spec, torch.bfloat16, Path(), Path(), lambda flats: None)
        sizes = Sizes.of(spec, model.dtype)
        expected = speeds(sizes, replace(room, host=free_memory().host))
        for kind, speed in measured(model, sizes):
            case = {"model": preset, "base": base, "placement": kind, "measured": round(speed, 2)}
            found["cases"].append(case | {"expected": round(expected[kind], 2)})
            print(found["cases"][-1], flush=True)
            Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
