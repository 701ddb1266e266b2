"""Check that a checkpoint fits the model that it describes, before it is exported, generates text or is resumed.

Hashes only show that files are as they were written. A checkpoint can have sound files that contradict each other, for
example if its metadata was edited, or if files of two checkpoints were mixed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rptrain.checkpoint import frozen
from rptrain.checkpoint.atomic_dir import BASE, STATE, Damaged
from rptrain.checkpoint.state import dtype_of, read_state
from rptrain.checkpoint.unit_files import by_unit, elements, unit_file
from rptrain.checkpoint.unit_tensors import DTYPES, Layout, file_layout
from rptrain.engine.memory.moments import kind_of, layout
from rptrain.engine.memory.step_layout import accumulate_dtype
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.objects import unique_keys

MAX_HEADER = 1 << 20  # bytes; a unit has at most six tensors
KINDS = {name: dtype for dtype, name in DTYPES.items()}


def read_model(checkpoint: Path) -> tuple[dict[str, Any], ModelSpec]:
    """The content of a checkpoint's trainer_state.json, and its model with the adapters or frozen units of its run.

    Damaged if they contradict each other or the headers of the units' files. UserError if a version of rptrain that
    could train this model is needed.
    """
    state = read_state(checkpoint)
    meta = state["meta"]
    frozen.check_base(checkpoint, meta)
    try:
        spec = frozen.spec_of(checkpoint, meta)
    except UserError as error:
        raise Damaged(
            f"{checkpoint} is damaged: {STATE} does not fit the model of {BASE}/config.json: {error}"
        ) from error
    units = {unit_file(index, unit.name): unit for index, unit in enumerate(spec.units) if unit.trainable}
    names = by_unit(state["units"])
    if differing := units.keys() ^ names.keys():
        raise _other_model(checkpoint, min(differing))
    first = next(iter(state["units"].values()))
    dtype = dtype_of(state)
    for whole, unit in units.items():
        own = DTYPES[unit.dtype_in(dtype)]
        parts = elements(checkpoint, names[whole], unit.numel)
        wired = _is_wired(state["units"][next(iter(parts))])
        for name, part in parts.items():
            stored = state["units"][name]
            alike = stored["param"]["dtype"] == own and _kinds(stored) == _kinds(first)
            if not alike or stored != _expected(part, stored, wired=wired):
                raise _other_model(checkpoint, name)
            _check_header(checkpoint / name, stored)
    _check_progress(checkpoint, meta, DTYPES[dtype])
    return state, spec


def _kinds(stored: Layout) -> tuple[str, bool]:
    """What all units share: the type of the moments, and whether there is a previous generation."""
    return stored["exp_avg"]["dtype"], "previous" in stored


def _is_wired(stored: Layout) -> bool:
    """Whether the previous generation is in the wire format."""
    previous = stored.get("previous", {})
    return previous.get("dtype") == DTYPES[torch.uint8] and len(previous["shape"]) == 1


def _expected(part: slice, stored: Layout, *, wired: bool) -> Layout:
    """The layout of the file with a part of a unit, with these types of parameters and moments.

    The length of a previous generation in the wire format is not known here. It is in the first part.
    """
    dtype, kind = (KINDS[stored[name]["dtype"]] for name in ("param", "exp_avg"))
    numel = part.stop - part.start
    tensors = {"param": (dtype, numel)}
    if "previous" in stored:
        tensors["previous"] = (dtype, numel)
        if wired:
            tensors["previous"] = torch.uint8, 0 if part.start else stored["previous"]["shape"][0]
    if dtype == torch.bfloat16:
        tensors["remainder"] = (torch.int16, numel)
    if dtype == torch.float16:
        tensors["masters"] = (torch.float32, numel)
    for name, each, shared in layout(kind_of(kind), accumulate_dtype(dtype)):
        tensors[name] = (each, numel // shared)
    return file_layout(tensors)


def _check_header(file: Path, stored: Layout) -> None:
    """Damaged if the header of a unit's file is not what the checkpoint's metadata says."""
    with open_regular(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        encoded = stream.read(min(length, MAX_HEADER))
    try:
        header = json.loads(encoded, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        header = None
    if header != stored:
        raise Damaged(f"{file} is damaged: its header is not what {STATE} says")


def _check_progress(checkpoint: Path, meta: Mapping[str, Any], dtype: str) -> None:
    """Damaged if a run could not continue from its own checkpoint: updates are not counted, the model's folder is not
    named, or the loss scale is of another type.
    """
    scaled = dtype == DTYPES[torch.float16]
    if "loss_scale" in meta and not scaled:
        raise Damaged(f"{checkpoint / STATE} is damaged: it has a loss scale, but its parameters are {dtype}")
    needed = ("applied", "loss_scale") if scaled else ("applied",)
    needed = ("model_dir", *needed) if "data" in meta else ("model_dir",)
    if missing := [key for key in needed if key not in meta]:
        raise Damaged(f"{checkpoint / STATE} is damaged: meta.{missing[0]} is missing")


def _other_model(checkpoint: Path, name: str) -> Damaged:
    config = checkpoint / BASE / "config.json"
    return Damaged(f"{checkpoint / name} does not belong to the model of {config}: the checkpoint was changed")
