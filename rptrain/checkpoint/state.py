"""Save and load the exact state of training (parameters, optimizer state, position) in `checkpoint-<step>`.

    checkpoint-120/
      units/00003-layers.2.safetensors    flat: param, previous (async only), remainder or masters, and the moments
      base/                               config, tokenizer and chat template of the model, for the export
      trainer_state.json                  step, meta, and the tensors of each unit's file
      complete.json                       sizes and hashes of the rest; written last

Gradients are not stored, because a step consumes them. Frozen units are not stored either (frozen.py). Of a unit that
devices read in its wire format (engine/wire.py), `previous` has the bytes of that format; older versions stored the
weights, which are quantized when they are read. The newest generation is made from `param`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rptrain.checkpoint.atomic_dir import (
    FORMAT,
    KIND,
    PARTIAL,
    PIECE,
    REPLACED,
    STATE,
    THREADS,
    check_hash,
    complete_checkpoints,
    discard,
    is_of_kind,
    read_into,
    remove,
    set_aside,
    written_aside,
)
from rptrain.checkpoint.base_files import BASE, base_files
from rptrain.checkpoint.metadata import read_facts
from rptrain.engine import wire
from rptrain.engine.optim.moments import kind_of
from rptrain.engine.store import UnitState
from rptrain.models.spec import Unit
from rptrain.models.weights.safetensors_io import as_bytes
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}

Layout = Mapping[str, Mapping[str, Any]]  # the safetensors header: dtype, shape and offsets of each tensor


def save_state(
    checkpoints_dir: Path,
    units: Sequence[UnitState],
    *,
    step: int,
    meta: Mapping[str, Any],
    order: Sequence[int] = (),
    release: Callable[[int], None] = lambda unit: None,
    proceed: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `checkpoint-<step>` and returns its path. Training may continue meanwhile, but no unit may change before
    `release` was called with its number. The units in `order` are written in this order.

    `meta` is JSON data that `load_state` returns again. `meta["model_dir"]` is the directory of the base model, whose
    config, tokenizer and template are copied. `meta["chat_template"]` (Jinja text), if present, replaces the model's
    template. An incomplete checkpoint of this step is renamed. No tensor is copied in memory. `checkpoints_dir` is
    created, but not its parent. DiskFull if there is too little space. `proceed` is called before each piece is
    written; an exception from it ends the save.
    """
    target = Path(checkpoints_dir) / f"checkpoint-{step}"
    base = base_files(Path(meta["model_dir"]), meta.get("chat_template"))
    files = _files(units)
    numbers = {unit_file(index, state.unit): index for index, state in enumerate(units)}
    places = {unit: place for place, unit in enumerate(order)}
    layouts = {name: _layout(_tensors(state)) for name, state in files.items()}
    needed = sum(tensor.nbytes for state in files.values() for tensor in _tensors(state).values())

    def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
        yield _header(tensors)
        for whole in map(as_bytes, tensors.values()):
            for start in range(0, len(whole), PIECE):
                proceed()
                yield whole[start : start + PIECE]

    target.parent.mkdir(exist_ok=True)
    if os.path.lexists(target) and not is_of_kind(target, KIND):
        set_aside(target)
    with written_aside(target, {"kind": KIND, "step": step}, needed + sum(map(len, base.values()))) as aside:

        def write(name: str) -> None:
            aside.write(name, pieces(_tensors(files[name])))
            release(numbers[name])

        with ThreadPoolExecutor(THREADS) as pool:  # not more: training needs the cores for torch's threads
            for _ in pool.map(write, sorted(files, key=lambda name: places.get(numbers[name], 0))):
                pass
        for name, content in base.items():
            aside.write(f"{BASE}/{name}", [content])
        aside.write_json(STATE, {"format": FORMAT, "step": step, "meta": dict(meta), "units": layouts})
    return target


def read_state(directory: Path) -> dict[str, Any]:
    """The content of a checkpoint's trainer_state.json, without tensors. UserError if it is damaged or incomplete."""
    return read_facts(Path(directory))[0]


def load_state(directory: Path, units: Sequence[UnitState]) -> dict[str, Any]:
    """Loads the trainable units from a checkpoint and returns `step` and `meta`. Generation 0 becomes the current one.

    Damaged if a file is not as it was written. UserError if the checkpoint has another model, dtype, format of the
    moments or kind of update. Everything but the hashes of units is checked before a buffer is changed. After an error
    the content of the buffers is undefined.
    """
    directory = Path(directory)
    state, files = read_facts(directory)
    expected = _files(units)
    if odd := set(state["units"]) ^ set(expected):
        raise UserError(f"{directory} belongs to another model: {min(odd)} is in one of them only")
    for name, unit in expected.items():
        stored = state["units"][name]
        _compare(directory / name, stored, _layout(_tensors(unit) | _converted(unit, stored)))

    for unit in expected.values():
        unit.current, unit.before = 0, unit.generations - 1

    def read(name: str) -> None:
        unit = expected[name]
        converted = _converted(unit, state["units"][name])
        tensors = _tensors(unit) | converted
        header = memoryview(bytearray(len(_header(tensors))))
        read_into(directory / name, files[name], [header, *map(as_bytes, tensors.values())])
        for flat in converted.values():
            for write in wire.writes(unit.unit, flat, unit.wire[unit.before]):
                write()
        for write in unit.wire_writes(unit.current):
            write()

    in_parallel(read, sorted(expected, key=lambda name: files[name]["size"], reverse=True))
    return state


def verify_checkpoint(directory: Path) -> dict[str, Any]:
    """Checks the hash of every file and returns `step` and `meta`. UserError names what is damaged."""
    directory = Path(directory)
    state, files = read_facts(directory)
    in_parallel(lambda name: check_hash(directory / name, files[name]), files)
    return state


def latest(checkpoints_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step; None if there is none."""
    complete = complete_checkpoints(Path(checkpoints_dir))
    return complete[-1] if complete else None


def prune(checkpoints_dir: Path, keep: int | None, best: Path | None = None) -> None:
    """Deletes all but the newest `keep` checkpoints (None keeps all), and what a killed save left behind.

    `best` is always kept, in place of the oldest of these if there are several.
    """
    assert keep is None or keep >= 1
    complete = complete_checkpoints(Path(checkpoints_dir))
    stays = complete if keep is None else complete[-keep:]
    if best is not None and best not in stays:
        stays = [best, *stays[-max(len(stays) - 1, 1) :]]
    for path in list(Path(checkpoints_dir).glob("*checkpoint-*")):
        if path.name.endswith(PARTIAL):
            discard(path)
        elif path in complete:
            if path not in stays:
                remove(path)
        elif path.name.endswith(REPLACED) and is_of_kind(path, KIND):  # its replacement is complete
            remove(path)


def unit_file(index: int, unit: Unit) -> str:
    """The path of a unit's file within a checkpoint."""
    return f"units/{index:05}-{unit.name}.safetensors"


def _files(units: Sequence[UnitState]) -> dict[str, UnitState]:
    """The trainable units by file."""
    return {unit_file(index, state.unit): state for index, state in enumerate(units) if state.unit.trainable}


def _tensors(state: UnitState) -> dict[str, Tensor]:
    """The saved tensors of a unit, in the file's order: W_T, W_{T-1} (equal after a skipped step), optimizer state."""
    tensors = {"param": state.params[state.newest]}
    if state.generations == 2:
        tensors["previous"] = state.wire[state.before] if state.wire else state.params[state.before]
    if state.remainder is not None:
        tensors["remainder"] = state.remainder
    if state.masters is not None:
        tensors["masters"] = state.masters
    return tensors | state.moments


def _converted(state: UnitState, stored: Layout) -> dict[str, Tensor]:
    """A place for a previous generation that an older version stored as weights, to be converted to the wire format.

    It is in the gradient's buffer, which holds nothing yet.
    """
    weights = "previous" in stored and stored["previous"]["dtype"] == stored["param"]["dtype"]
    if not (weights and len(state.wire) == 2):
        return {}
    flat = state.params[0]
    return {"previous": state.grad.view(torch.uint8)[: flat.nbytes].view(flat.dtype)}


def dtype_of(state: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the parameters of a checkpoint, from the result of `read_state`."""
    name = next(iter(state["units"].values()))["param"]["dtype"]
    return next(dtype for dtype, known in DTYPES.items() if known == name)


def _layout(tensors: Mapping[str, Tensor]) -> Layout:
    layout, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype, shape = DTYPES[tensor.dtype], list(tensor.shape)
        layout[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return layout


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    encoded = json.dumps(_layout(tensors)).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _compare(file: Path, stored: Layout, expected: Layout) -> None:
    """UserError that says how the saved state differs from the run's, and what to do."""
    if ("previous" in stored) != ("previous" in expected):
        update, other = ("async", "sync") if "previous" in stored else ("sync", "async")
        raise UserError(
            f'{file} was saved with optim.update = "{update}" and cannot be resumed with "{other}": set '
            f'optim.update = "{update}", or export the checkpoint and start a new run from it'
        )
    there, here = stored["param"], expected["param"]
    if there["dtype"] != here["dtype"]:
        names = {value: str(key).removeprefix("torch.") for key, value in DTYPES.items()}
        raise UserError(
            f'{file} was saved with model.dtype = "{names[there["dtype"]]}" and cannot be resumed with '
            f'"{names[here["dtype"]]}": set model.dtype, or export the checkpoint and start a new run from it'
        )
    if "previous" in stored and stored["previous"]["dtype"] == DTYPES[torch.uint8] != expected["previous"]["dtype"]:
        raise UserError(
            f"{file} was saved with engine.fp8 = true and cannot be resumed without: set engine.fp8 = true, or export "
            "the checkpoint and start a new run from it"
        )
    kinds = {name: kind for kind, name in DTYPES.items()}
    saved, wanted = (kind_of(kinds[layout["exp_avg"]["dtype"]]) for layout in (stored, expected))
    if saved != wanted:
        raise UserError(
            f'{file} was saved with optim.moments = "{saved}" and cannot be resumed with "{wanted}": set '
            f'optim.moments = "{saved}", or export the checkpoint and start a new run from it'
        )
    if stored != expected:
        odd = next(name for name in {**stored, **expected} if stored.get(name) != expected.get(name))
        raise UserError(f"{file} belongs to another model: {odd} is {stored.get(odd)}, not {expected.get(odd)}")
