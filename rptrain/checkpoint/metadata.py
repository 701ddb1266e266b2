"""Read and check the metadata of a checkpoint: trainer_state.json, as `save_state` writes it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from rptrain.checkpoint.atomic_dir import CHECKPOINT, KIND, MANIFEST, STATE, Damaged, check_hash, read_manifest
from rptrain.config.types import MAX_COUNT
from rptrain.utils.files import read_small
from rptrain.utils.objects import unique_keys

# A run's config, the folder of its checkpoints, and its events.
RUN_CONFIG, CHECKPOINTS, EVENTS = "config.toml", "checkpoints", "events.jsonl"


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a unit's file, as in the safetensors header."""

    dtype: Literal["BF16", "F16", "F32", "F64", "I16", "I8", "U8"]
    shape: list[NonNegativeInt]
    data_offsets: list[NonNegativeInt]


MISSING: Any = None  # the default of a missing key; an explicit null is invalid


@dataclass(frozen=True)
class _Unit:
    """The tensors that every unit has, and the previous generation of async."""

    param: _Tensor
    exp_avg: _Tensor
    previous: _Tensor = MISSING


@dataclass(frozen=True)
class _Validation:
    data: str
    best: float | None
    bad: NonNegativeInt
    loss: float | None


_Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _LossScale:
    scale: _Scale
    before: _Scale
    good: NonNegativeInt


@dataclass(frozen=True)
class _Frozen:
    patterns: list[str]
    drawn: bool
    seed: NonNegativeInt
    sha256: dict[str, str]
    base: Literal["bf16", "nf4", "nf4-double", "mxfp4", "int8", "fp8"] = "bf16"
    stored: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class _Settings:
    """The settings of LoRA as checkpoint/adapter.py writes them. That module imports torch, so it is not used here."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # training with unknown settings is not supported
    r: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 8
    alpha: Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT, allow_inf_nan=False)] = 8
    target_modules: str | list[str] = ""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rslora: bool = False
    modules_to_save: list[str] = field(default_factory=list)
    use_dora: bool = False
    target_parameters: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Adapter:
    settings: _Settings
    base: str


@dataclass(frozen=True)
class _Meta:
    """The meta of a run's checkpoint. Other checkpoints may have fewer keys."""

    data: str = ""
    model_dir: str = ""
    chat_template: str = ""
    config: dict[str, Any] = MISSING
    applied: NonNegativeInt = 0
    validation: _Validation = MISSING
    loss_scale: _LossScale = MISSING
    frozen: _Frozen = MISSING
    lora: _Adapter = MISSING
    ends: list[NonNegativeInt] = MISSING
    padding_row: NonNegativeInt = MISSING
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = MISSING
    narrow: list[str] = MISSING


@dataclass(frozen=True)
class _State:
    step: NonNegativeInt
    meta: _Meta
    units: dict[str, _Unit]


def read_facts(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a checkpoint's STATE file, and the files of its manifest, after all quick checks: the sizes of all
    files, and the hashes of those outside of `units`. Damaged if a check fails.
    """
    manifest = read_manifest(directory)
    files = manifest["files"]
    if manifest.get("kind") != KIND:
        raise Damaged(f"{directory} is not a checkpoint of a run")
    for name, entry in files.items():
        if not name.startswith("units/"):
            check_hash(directory / name, entry)
    if STATE not in files:
        raise Damaged(f"{directory / MANIFEST} is damaged: it does not name {STATE}")
    text = read_small(directory / STATE)
    try:
        TypeAdapter(_State).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Damaged(f"{directory / STATE} is damaged: {place}: {first['msg']}") from error
    try:
        state = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise Damaged(f"{directory / STATE} is damaged: {error}") from error
    step, applied = state["step"], state["meta"].get("applied", 0)
    named = CHECKPOINT.fullmatch(directory.name)
    if step != manifest.get("step", step) or (named and step != int(named[1] or named[2])) or applied > step:
        raise Damaged(f"{directory / STATE} is damaged: step {step} and {applied} updates are not of this checkpoint")
    if lacking := state["units"].keys() - files.keys():
        raise Damaged(f"{directory / MANIFEST} is damaged: it does not name {min(lacking)}")
    return state, files
