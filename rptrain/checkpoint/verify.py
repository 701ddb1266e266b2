"""Read an export back and check that its tensors are complete, of the right shape, and finite."""

from math import prod
from pathlib import Path

import torch

from rptrain.checkpoint import adapter
from rptrain.checkpoint.atomic_dir import MANIFEST, THREADS, check_hash, read_manifest
from rptrain.models.families import registry
from rptrain.models.spec import ModelSpec
from rptrain.models.weights import pretrained
from rptrain.models.weights.carried import NOTHING, Carried
from rptrain.models.weights.safetensors_io import read_header, read_one
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import in_parallel


def verify(directory: Path, spec: ModelSpec | None = None, carried: Carried = NOTHING) -> None:
    """UserError unless the directory has a complete model: count, names, shapes and dtype of its tensors, and finite
    values; and `carried` tensors, unchanged. If there is a manifest, sizes and hashes are checked too.

    `spec` None stands for the model that config.json describes.
    """
    directory = Path(directory)
    _check_hashes(directory)
    config = registry.model_config(directory)
    spec = spec or registry.build(config)
    files = pretrained.check(directory, spec)
    carried.check(files.carried)
    tensors = files.tensors
    names = {*map(spec.stored_name, tensors), *files.carried}
    written = {name for file in files.stamps for name in read_header(file)}
    wrong = [f"{name} is missing" for name in sorted(names - written)]
    wrong += [f"{name} is not part of the model" for name in sorted(written - names)]  # `check` leaves them out
    if wrong:
        raise UserError(f"{directory}: {wrong[0]}")
    if empty := [name for name, stored in tensors.items() if not prod(stored.shape)]:
        raise UserError(f"{directory}: {empty[0]} has no elements")
    count = sum(prod(stored.shape) for stored in tensors.values())
    if count != spec.num_parameters:
        raise UserError(f"{directory} holds {count} parameters, and the model has {spec.num_parameters}")
    own = {part.key for unit in spec.units for param in unit.params if param.dtype is not None for part in param.parts}
    found = {str(stored.dtype).removeprefix("torch.") for name, stored in tensors.items() if name not in own}
    if found != {config.get("dtype")}:
        raise UserError(f"{directory}: weights are {', '.join(sorted(found))}, config.json says {config.get('dtype')}")
    by_file: dict[Path, list[str]] = {}
    for name, stored in tensors.items():
        by_file.setdefault(stored.file, []).append(spec.stored_name(name))
    in_parallel(lambda file: _check_finite(file, by_file[file]), by_file, THREADS)


def verify_adapter(directory: Path, spec: ModelSpec, made: adapter.Adapter) -> None:
    """UserError unless the directory has the complete adapter of a model as PEFT reads it: its config, and the count,
    names, shapes and dtype of its tensors, and finite values. If there is a manifest, hashes are checked too.
    """
    _check_hashes(directory)
    files = adapter.read(directory)
    adapter.check(files, spec)
    found, wanted = files.config.to_dict(), made.config(spec).to_dict()
    if wrong := [key for key in wanted if wanted[key] != found[key]]:
        raise UserError(f"{directory / adapter.CONFIG} does not hold what was written to it: {', '.join(wrong)}")
    if len(dtypes := {str(stored.dtype).removeprefix("torch.") for stored in files.tensors.values()}) > 1:
        raise UserError(f"{directory}: weights are {', '.join(sorted(dtypes))}, and should be of one type")
    _check_finite(directory / adapter.WEIGHTS, [*files.tensors])


def _check_hashes(directory: Path) -> None:
    if (directory / MANIFEST).is_file():
        entries = read_manifest(directory)["files"]
        in_parallel(lambda name: check_hash(directory / name, entries[name]), entries)


def _check_finite(file: Path, names: list[str]) -> None:
    stored = read_header(file)
    for name in names:
        if not bool(torch.isfinite(read_one(stored[name])).all()):
            raise UserError(f"{file}: {name} holds values that are infinite or not numbers")
