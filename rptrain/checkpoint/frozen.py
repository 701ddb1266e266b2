"""The frozen units and carried tensors of a run. Checkpoints leave them out; they are read from the model's own files.

`frozen` in a checkpoint's meta has the patterns that select the units, the format in which they are stored, whether
they were randomly initialized and with which seed, the hashes of units and of carried tensors, and under `stored` the
digests of the tensors in the files (models/weights/digests.py), which do not depend on the type of the run.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rptrain.checkpoint.adapter import Adapter
from rptrain.checkpoint.atomic_dir import BASE
from rptrain.kernels.quant import Quantized
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.params import Unit
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.lora import adapter_units, set_magnitudes, with_lora, without_adapters
from rptrain.models.transforms.quantize import base_of, with_base
from rptrain.models.weights import carried as carried_tensors
from rptrain.models.weights import mxfp4, pretrained
from rptrain.models.weights.carried import NOTHING, Carried
from rptrain.models.weights.digests import TensorDigests
from rptrain.models.weights.file_backed import FileBackedUnit
from rptrain.models.weights.safetensors_io import Hashing, as_bytes
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase

Flats = Sequence[tuple[Unit, Tensor | FileBackedUnit]]  # frozen units, each with the flat buffer of its parameters


def describe(
    flats: Flats,
    patterns: Sequence[str],
    seed: int,
    files: pretrained.WeightFiles | None,
    base: str,
    digests: TensorDigests | None = None,
) -> dict[str, Any] | None:
    """`frozen` of a checkpoint's meta; None if no weights are frozen, and none carried along. No `files`: the weights
    were randomly initialized. `digests` has those of the units that were read into memory; the others are added.
    """
    carried = {} if files is None else carried_tensors.hashes(files.carried)
    if not flats and not carried:
        return None
    found = hashes(flats, digests)
    described: dict[str, Any] = {"patterns": [*patterns], "base": base, "drawn": files is None, "seed": seed}
    described["sha256"] = found
    if digests is not None and files is not None:
        described["stored"] = digests.groups(tensor_names([unit for unit, _ in flats], files.tensors))
    return described | ({"carried": carried} if carried else {})


def hashes(flats: Flats, hashing: Hashing | None = None) -> dict[str, str]:
    """SHA-256 of each unit by name. `hashing` takes those of tensors in files. UserError if weights in files are
    infinite or NaN.
    """
    found: dict[str, str] = {}

    def digest(item: tuple[Unit, Tensor | FileBackedUnit]) -> None:
        unit, flat = item
        found[unit.name] = sha256(as_bytes(flat)).hexdigest() if isinstance(flat, Tensor) else flat.digest(hashing)

    with phase("hashing frozen weights", sum(flat.nbytes for _, flat in flats), reads=True) as reading:
        in_parallel(digest, flats, done=lambda item: reading.add(item[1].nbytes * isinstance(item[1], Tensor)))
    return found


def check(meta: Mapping[str, Any], found: Mapping[str, str]) -> None:
    """UserError if hashes of units differ from those in the meta of a checkpoint."""
    for name, digest in found.items():
        if meta["frozen"]["sha256"].get(name) != digest:
            raise UserError(
                f"the frozen weights of {name} changed since the run started: restore the files in {meta['model_dir']}"
            )


def check_carried(meta: Mapping[str, Any], found: Mapping[str, str]) -> None:
    """UserError if the carried tensors, with these hashes, are not exactly those in the meta of a checkpoint."""
    known = meta.get("frozen", {}).get("carried", {})
    for name in sorted(known.keys() | found.keys()):
        if found.get(name) == known.get(name):
            continue
        what = "was added" if name not in known else "changed" if name in found else "was removed"
        raise UserError(f"the tensor {name} {what} since the run started: restore the files in {meta['model_dir']}")


def check_base(checkpoint: Path, meta: Mapping[str, Any]) -> None:
    """UserError if the base of adapters is in a format that was removed."""
    if "lora" in meta and "frozen" in meta and meta["frozen"].get("base") == "nf4-double":
        raise UserError(
            f"{checkpoint} was trained with lora.double_quant, which was removed: use it with the version of rptrain "
            "that began the run"
        )


def spec_of(checkpoint: Path, meta: Mapping[str, Any]) -> ModelSpec:
    """The model of a checkpoint, with the adapters or frozen units of its run. UserError if it has none."""
    check_base(checkpoint, meta)
    spec = registry.build(read_config(checkpoint / BASE))
    spec = replace(spec, narrow=tuple(meta.get("narrow", ())))
    if "lora" in meta:
        if "frozen" not in meta:
            raise UserError("meta.lora needs meta.frozen, which is missing")
        return with_base(with_lora(spec, Adapter.of(meta["lora"]).settings), meta["frozen"].get("base", "bf16"))
    return freeze(spec, meta["frozen"]["patterns"]) if "frozen" in meta else spec


def reader(meta: Mapping[str, Any], spec: ModelSpec, dtype: torch.dtype) -> Callable[[int], dict[str, Tensor]]:
    """A function that reads the parameters of a frozen unit from their source in the run, and dequantizes them.

    UserError if they are missing or were changed.
    """
    seed, files = meta["frozen"]["seed"], _source(meta, spec)

    def read(index: int) -> dict[str, Tensor]:
        unit = spec.units[index]
        flat = torch.zeros(unit.nbytes(dtype.itemsize), dtype=torch.uint8)
        plain, quantized = unit.stored_views(flat, dtype)
        fill(spec, lambda _, name: {**plain, **quantized}[name], files, seed, [index], {})
        check(meta, hashes([(unit, flat)]))
        return plain | unit.dequantize(quantized, dtype)

    return read


def load(meta: Mapping[str, Any], spec: ModelSpec, dtype: torch.dtype, flats: Sequence[Tensor]) -> None:
    """Fills the bytes of all frozen units, which are zeros, from their source in the run. `flats`: the bytes of each
    unit. UserError if they are missing or were changed.
    """
    frozen, files, stored = meta["frozen"], _source(meta, spec), meta["frozen"].get("stored")
    units = [spec.units[index] for index in spec.frozen]
    digests, names = None, list[str]()
    if files is not None and stored:
        names = tensor_names(units, files.tensors)
        digests = TensorDigests({name: files.tensors[name] for name in names}, files.stamps)
    fill(spec, tensors_in(spec, flats, dtype), files, frozen["seed"], spec.frozen, {}, digests)
    if digests is not None:
        same = not digests.differing(stored, names)
        digests.keep()
        if same:
            return
    check(meta, hashes([(unit, flats[index]) for index, unit in zip(spec.frozen, units, strict=True)]))


def tensors_in(spec: ModelSpec, flats: Sequence[Tensor], dtype: torch.dtype) -> pretrained.StoredView:
    """The parameters as they are stored in the bytes of each unit."""
    tensors: list[dict[str, Tensor | Quantized]] = []
    for unit, flat in zip(spec.units, flats, strict=True):
        plain, quantized = unit.stored_views(flat, dtype)
        tensors.append({**plain, **quantized})
    return lambda index, name: tensors[index][name]


def tensor_names(units: Iterable[Unit], tensors: Collection[str]) -> list[str]:
    """Which of a model's stored tensors those of units are."""
    keys = [part.key for unit in units for param in unit.params for part in param.parts]
    return [name for key in keys for name in ((key,) if key in tensors else mxfp4.names(key))]


def stored_bytes(files: pretrained.WeightFiles, units: Iterable[Unit]) -> int:
    """The bytes in a model's files of the tensors of units."""
    return sum(files.tensors[name].nbytes for name in tensor_names(units, files.tensors))


def _source(meta: Mapping[str, Any], spec: ModelSpec) -> pretrained.WeightFiles | None:
    """The files with the frozen weights; None if they were randomly initialized."""
    return None if meta["frozen"]["drawn"] else pretrained.check(meta["model_dir"], without_adapters(spec))


def carried(meta: Mapping[str, Any], spec: ModelSpec) -> Carried:
    """The tensors that the run's model has beside its weights, in their source. UserError if one is missing."""
    known = meta.get("frozen", {}).get("carried", {})
    if not known:
        return NOTHING
    files = pretrained.check(meta["model_dir"], without_adapters(spec))
    if missing := [name for name in known if name not in files.carried]:
        raise UserError(f"{missing[0]} is missing from {meta['model_dir']}: restore its files")
    return Carried({name: files.carried[name] for name in known}, known)


def fill(
    spec: ModelSpec,
    view: pretrained.StoredView,
    files: pretrained.WeightFiles | None,
    seed: int,
    units: Sequence[int],
    file_backed: Mapping[int, FileBackedUnit],
    digests: TensorDigests | None = None,
) -> None:
    """Loads these units from the model's files into their views. Adapters, and all units if there are no files, are
    randomly initialized. `file_backed`: the file-backed units of the model. What is read is hashed for `digests`.
    """
    drawn = units if files is None else [unit for unit in units if unit in adapter_units(spec)]
    pretrained.initialize(spec, view, seed, drawn)
    if files is not None and (read := [unit for unit in units if unit not in drawn]):
        total = stored_bytes(files, [spec.units[unit] for unit in read])
        with phase(f"reading {'and quantizing ' * (base_of(spec) != 'bf16')}weights", total, reads=True):
            pretrained.load(files, spec, view, read, digests)
    if not set(units).isdisjoint(adapter_units(spec)):
        set_magnitudes(spec, view, file_backed)
