"""A model's weights: checking, loading, initializing and saving checkpoints."""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.quant import Quantized, finite
from rptrain.models.locate import how_to_complete, read_config
from rptrain.models.params import CheckpointPart, Param
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.weights import mxfp4, quantized
from rptrain.models.weights.carried import NOTHING, Carried
from rptrain.models.weights.digests import TensorDigests
from rptrain.models.weights.names import BUFFERS, TIED_HEAD, Names
from rptrain.models.weights.safetensors_io import Stored, check_floats, read, read_header, write
from rptrain.utils.errors import UserError
from rptrain.utils.file_ranges import Stamp
from rptrain.utils.files import naming
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase

log = logging.getLogger(__name__)

Entry = tuple[tuple[int, ...], torch.dtype]  # the shape and type of a tensor in a checkpoint
View = Callable[[int, str], Tensor]  # a parameter on the host by unit index and name, to read or to fill
StoredView = Callable[[int, str], Tensor | Quantized]  # the same in its stored form

SINGLE = "model.safetensors"
SHARDS = "model-*-of-*.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "embed_tokens.weight"
DRAWN = 1 << 20  # numbers drawn at a time, so that threads rarely contend; a multiple of DRAWN_UNIT
DRAWN_UNIT = 16  # numbers that torch draws together
SHOWN = 5  # names in a warning
EXTRA = (  # what to do about tensors that are inside of the model, and that its config.json does not describe
    "Tensors inside of the model are not left out, because it would compute something else without them: correct "
    "config.json, or delete them from the files."
)
CHECKED = 1 << 20  # numbers checked or compared at a time, so that all threads have work


@dataclass(frozen=True)
class WeightFiles:
    """The checked tensors of a checkpoint by name: all tensors of the model, with their shapes or in 4 bits."""

    directory: Path
    tensors: Mapping[str, Stored]
    carried: Mapping[str, Stored]  # those that training leaves out, by names in the files: models/weights/carried.py
    stamps: Mapping[Path, Stamp]  # stamps of its files, taken before their headers were read


@dataclass(frozen=True)
class _Place:
    """The place of a checkpoint's tensor in the model: rows of a unit's parameter."""

    unit: int
    param: Param
    start: int
    part: CheckpointPart

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.part.rows, *self.param.shape[1:])

    @property
    def packed(self) -> dict[str, tuple[int, ...]]:
        """The shapes, by name, of alternative 4-bit tensors."""
        return mxfp4.shapes(self.part.key, self.shape) if self.part.mxfp4 else {}

    def stored(self, dtype: torch.dtype, narrow: Collection[str]) -> Entry:
        """The shape, and the type in the checkpoint of a model in `dtype` with these `narrow` tensors."""
        return self.shape, dtype if self.part.key in narrow else self.param.dtype_in(dtype)

    def of(self, view: View) -> Tensor:
        return view(self.unit, self.param.name)[self.start : self.start + self.part.rows]

    def target(self, view: StoredView) -> Tensor | Quantized:
        whole, stop = view(self.unit, self.param.name), self.start + self.part.rows
        if not isinstance(whole, Quantized):
            return whole[self.start : stop]
        each = prod(self.shape[1:])
        return whole.part(self.start * each, stop * each)


def embedding_is_head(directory: Path) -> bool:
    """Whether no head that the files have differs from their embedding."""
    tensors = stored_tensors(directory).items()
    heads, embeddings = ([tensor for name, tensor in tensors if name.endswith(kind)] for kind in (TIED_HEAD, EMBEDDING))
    return all(_same(head, embedding) for head in heads for embedding in embeddings)


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name; empty if its files cannot be read, which `check` reports."""
    try:
        return {name: tensor for file in find_files(directory) for name, tensor in read_header(file).items()}
    except UserError:
        return {}


def check(directory: str | Path, spec: ModelSpec) -> WeightFiles:
    """Compares a checkpoint's safetensors headers with the model, without loading any weight.

    Raises UserError with everything that is missing, unexpected or of another shape, or with the name of a file that
    is missing, truncated or not safetensors. Warns about shards that are not read.
    """
    directory = Path(directory)
    if (directory / SINGLE).is_file() and any(directory.glob(SHARDS)):
        log.warning(
            "%s: %s is read, as in transformers, and the files %s beside it are not: delete what is out of date",
            *(directory, SINGLE, SHARDS),
        )
    places = _places(spec)
    packed = {name for place in places.values() for name in place.packed}
    known, stored = Names(spec), dict[str, Stored]()
    names: dict[str, str] = {}  # the names in the files
    stamps: dict[Path, Stamp] = {}
    for file in find_files(directory):
        stamps[file] = Stamp.of(file)
        for stored_name, tensor in read_header(file).items():
            name = known.module_name(stored_name)
            if name in stored:
                raise UserError(_twice(names[name], stored[name].file, stored_name, file))
            names[name], stored[name] = stored_name, tensor
    embedding = spec.units[0].params[0].parts[0].key
    if spec.tied and embedding not in stored and TIED_HEAD in stored:  # the shared tensor is under the head's name
        stored[embedding], names[embedding] = stored.pop(TIED_HEAD), names.pop(TIED_HEAD)
    kept = {
        name
        for name in stored
        if name in packed or spec.carries(name) or _ignored(name, spec) or known.is_outside(name)
    }
    check_floats({names[name]: tensor for name, tensor in stored.items() if name not in kept})
    stored = _taken_apart(stored, spec)
    wanted: dict[str, tuple[int, ...]] = {}
    for name, place in places.items():
        wanted |= place.packed if not stored.keys().isdisjoint(place.packed) else {name: place.shape}
    absent = [name for name in wanted if name not in stored]
    missing = [f"{spec.stored_name(name)} is missing{_tying(name)}" for name in absent]
    rest = {name: tensor for name, tensor in stored.items() if name not in wanted}
    carried = {name: tensor for name, tensor in rest.items() if spec.carries(name)}
    others = {name: names.get(name, name) for name in rest if name not in carried and not _ignored(name, spec)}
    if problem := known.problem(others.values(), absent):
        raise UserError(f"the weights in {directory} do not fit its config.json: {problem}")
    outside = [stored_name for name, stored_name in others.items() if known.is_outside(name)]
    extra = [
        f"{stored_name} is not part of the model" for name, stored_name in others.items() if stored_name not in outside
    ]
    shapes = [
        f"{names.get(name, name)} has shape {list(stored[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    wide = [f"{name} must be bytes" for name in packed & stored.keys() if stored[name].dtype != mxfp4.DTYPE]
    if problems := missing + extra + shapes + sorted(wide):
        shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        advice = f"\n{EXTRA}" if extra else ""
        raise UserError(f"the weights in {directory} do not fit its config.json:\n- " + "\n- ".join(shown) + advice)
    if outside:
        log.warning(
            "%s: tensors that are not part of the model are left out, also of exports, as in transformers: %s",
            *(directory, ", ".join(outside[:SHOWN]) + (", …" if len(outside) > SHOWN else "")),
        )
    if spec.tied and (head := stored.get(TIED_HEAD)) and not _same(head, stored[embedding]):
        raise UserError(
            f"{head.file}: lm_head.weight differs from the embedding, and config.json says that it does not: set "
            "tie_word_embeddings to false there"
        )
    carried = {names[name]: tensor for name, tensor in carried.items()}
    return WeightFiles(directory, {name: stored[name] for name in wanted}, carried, stamps)


def load(
    files: WeightFiles,
    spec: ModelSpec,
    view: StoredView,
    units: Collection[int] | None = None,
    digests: TensorDigests | None = None,
) -> None:
    """Fills the host views of all or some units, and converts to their dtype or format. What is read is hashed for
    `digests`.

    Raises UserError if a file was deleted or truncated, or if a loaded weight is NaN or infinite.
    """
    places, stored = _places(spec, units), files.tensors
    whole: list[tuple[Stored, Tensor]] = []
    dequantized: list[tuple[Stored, Stored, Tensor]] = []
    narrowed: list[tuple[Stored, Quantized, bool]] = []
    for name, place in places.items():
        target = place.target(view)
        packed = None if name in stored else mxfp4.of(name, stored)
        if isinstance(target, Quantized):
            if packed:
                whole += quantized.as_stored(*packed, target)
            else:
                narrowed.append((stored[name], target, place.param.transposed))
        elif packed:
            dequantized.append((*packed, target))
        else:
            whole.append((stored[name], target))
    read(whole, digests)
    in_parallel(_work, _dequantizing(dequantized, digests))
    in_parallel(_work, _quantizing(narrowed, digests))
    if name := not_finite(spec, view, units):
        target = places[name].target(view)
        dtype = target.format.name if isinstance(target, Quantized) else str(target.dtype).removeprefix("torch.")
        raise UserError(
            f"{files.directory}: {name} holds values that are infinite or not numbers in {dtype}: fetch the weights "
            "again, or use a model.dtype in which they fit"
        )


def _dequantizing(
    tensors: Iterable[tuple[Stored, Stored, Tensor]], digests: TensorDigests | None
) -> Iterator[Callable[[], None]]:
    for blocks, scales, target in tensors:
        if digests is not None:  # right before they are read, which is then from the page cache
            yield from digests.works(blocks, counted=False)
            yield from digests.works(scales, counted=False)
        yield from (partial(mxfp4.load, piece) for piece in mxfp4.pieces(blocks, scales, target))


def _quantizing(
    tensors: Iterable[tuple[Stored, Quantized, bool]], digests: TensorDigests | None
) -> Iterator[Callable[[], None]]:
    for stored, target, turned in tensors:
        if digests is not None:
            yield from digests.works(stored, counted=False)
        yield from (partial(quantized.load, piece) for piece in quantized.pieces(stored, target, turned))


def _work(work: Callable[[], None]) -> None:
    work()


def not_finite(spec: ModelSpec, view: StoredView, units: Collection[int] | None = None) -> str | None:
    """The first tensor of all or some units with a NaN or infinite value; None if there is none.

    Uses all cores and reads each weight once; of a quantized tensor, only its scales, or its codes in FP8.
    """
    found = set()

    def examine(item: tuple[str, Tensor]) -> None:
        name, piece = item
        if not finite(piece):
            found.add(name)

    places = _places(spec, units)
    targets = ((name, place.target(view)) for name, place in places.items())
    whole = ((name, target.checked if isinstance(target, Quantized) else target.view(-1)) for name, target in targets)
    in_parallel(examine, ((name, piece) for name, tensor in whole for piece in tensor.split(CHECKED)))
    return next((name for name in places if name in found), None)


def initialize(spec: ModelSpec, view: StoredView, seed: int, units: Collection[int] | None = None) -> None:
    """Initializes the weights of all or some units: normal, uniform or its logarithm, zeros or ones.

    A tensor's values depend only on the seed and its name.
    """
    own = _Own()

    def draw(item: tuple[str, _Place]) -> None:
        name, place = item
        target = place.target(view)
        if place.param.std is None:
            assert isinstance(target, Tensor)
            target.fill_(1)
            return
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        if isinstance(target, Quantized):
            unit = lcm(DRAWN_UNIT, target.format.block)
            count = DRAWN // unit * unit
            for begin in range(0, target.numel, count):
                part = target.part(begin, min(begin + count, target.numel))
                part.write(_drawn(own.numbers[: part.numel], place.param, generator))
            return
        for piece in target.view(-1).split(DRAWN):
            piece.copy_(_drawn(own.numbers[: len(piece)], place.param, generator))

    largest_first = sorted(_places(spec, units).items(), key=lambda item: -prod(item[1].shape))
    with phase("initializing weights", sum(prod(place.shape) for _, place in largest_first), "parameter") as drawing:
        in_parallel(draw, largest_first, done=lambda item: drawing.add(prod(item[1].shape)))


class _Own(threading.local):
    """A buffer per thread for random numbers, which is reused because allocation serializes threads."""

    def __init__(self) -> None:
        self.numbers = torch.empty(DRAWN)


def _drawn(out: Tensor, param: Param, generator: torch.Generator) -> Tensor:
    """Fills `out` (float32) with random numbers and returns it."""
    if param.log_uniform is not None:
        low, high = param.log_uniform
        return out.copy_((low + _shares(len(out), generator) * (high - low)).log_())
    if param.bound is not None:
        return out.copy_((2 * _shares(len(out), generator) - 1) * param.bound)
    assert param.std is not None
    return out.normal_(0, param.std, generator=generator)


def _shares(count: int, generator: torch.Generator) -> Tensor:
    """Uniform numbers between 0 and 1. What follows from them is rounded once, so it is the same on every machine."""
    return (torch.empty(count, dtype=torch.int64).random_(1 << 24, generator=generator).double() + 0.5) * 2.0**-24


def save(
    directory: str | Path,
    spec: ModelSpec,
    view: View,
    dtype: torch.dtype,
    max_shard_bytes: float = 5e9,
    wrote: Callable[[int], object] | None = None,
    carried: Carried = NOTHING,
) -> WeightFiles:
    """Saves the model in Hugging Face format, then reads the headers back and checks them.

    Writes model.safetensors, or model-0000i-of-0000N.safetensors with an index, and config.json, with one tensor in
    memory at a time. `carried` tensors are copied first, to shards of their own, since they may have changed. `wrote`
    is called with the bytes of each tensor. Raises UserError if the directory already has weights.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if old := sorted(path.name for path in directory.glob("*.safetensors*")):
        raise UserError(f"{directory} already holds weights ({old[0]}); save to another directory")
    places = _places(spec)
    own = {spec.stored_name(key): place.stored(dtype, spec.narrow) for key, place in places.items()}
    entries = carried.entries | own
    shards = [*_shards(carried.entries, max_shard_bytes), *_shards(own, max_shard_bytes)]
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    tensors = chain(carried.read(), (place.of(view) for place in places.values()))
    for name, shard in zip(names, shards, strict=True):
        write(directory / name, {key: entries[key] for key in shard}, islice(tensors, len(shard)), wrote)
    if len(shards) > 1:
        total = sum(map(_nbytes, entries.values()))
        by_tensor = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": by_tensor})
    _write_json(directory / "config.json", _config(spec, dtype))
    return check(directory, spec)


def _config(spec: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of the model in `dtype`."""
    config = {key: value for key, value in spec.config.items() if key not in ("torch_dtype", "quantization_config")}
    if spec.stored_prefixes:
        text = {key: value for key, value in spec.text_config.items() if key not in ("torch_dtype", "dtype")}
        tied = {"tie_word_embeddings": spec.tied}
        config |= {"text_config": text | tied, **tied}
    return config | {"architectures": [spec.architecture], "dtype": str(dtype).removeprefix("torch.")}


def stored_bytes(spec: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of the weights in a checkpoint of a model in `dtype`."""
    own = ((param, part) for unit in spec.units for param in unit.params if param.dtype for part in param.parts)
    narrowed = ((param, part.rows * prod(param.shape[1:])) for param, part in own if part.key in spec.narrow)
    saved = (numel * (param.dtype_in(dtype).itemsize - dtype.itemsize) for param, numel in narrowed)
    return spec.weight_bytes(dtype) - sum(saved)


def narrow(spec: ModelShape, files: WeightFiles) -> tuple[str, ...]:
    """`ModelShape.narrow` of a model with these files."""
    params = (param for unit in spec.units for param in unit.params)
    own = {part.key: param.dtype for param in params if param.dtype for part in param.parts}
    return tuple(key for key, dtype in own.items() if files.tensors[key].dtype.itemsize < dtype.itemsize)


def _places(spec: ModelShape, units: Collection[int] | None = None) -> dict[str, _Place]:
    """Places by tensor name, of all or some units."""
    places = {}
    for index, unit in enumerate(spec.units):
        for param in unit.params if units is None or index in units else ():
            start = 0
            for part in param.parts:
                places[part.key] = _Place(index, param, start, part)
                start += part.rows
    return places


def _taken_apart(stored: Mapping[str, Stored], spec: ModelSpec) -> dict[str, Stored]:
    """The tensors of a checkpoint, with stacked tensors split into parts."""
    taken = dict(stored)
    for param in (param for unit in spec.units for param in unit.params):
        if param.stack is None or param.stack.key not in stored or any(part.key in stored for part in param.parts):
            continue
        key, (rows, *rest) = param.stack.key, param.shape
        whole, expected = taken.pop(key), (param.stack.count, rows // param.stack.count, *rest)
        if whole.shape != expected:
            raise UserError(f"{whole.file}: {key} has shape {list(whole.shape)}, not {list(expected)}")
        start = whole.offset
        for part in param.parts:
            taken[part.key] = Stored(whole.file, start, whole.dtype, (part.rows, *rest))
            start += part.rows * prod(rest) * whole.dtype.itemsize
    return taken


def _same(first: Stored, second: Stored) -> bool:
    """Whether two tensors have the same shape and values. They are read up to the first difference."""
    if first.shape != second.shape:
        return False
    count = prod(first.shape)
    buffers = torch.empty(2, min(count, CHECKED))
    for start in range(0, count, CHECKED):
        size = min(count - start, CHECKED)
        one, other = (
            (Stored(each.file, each.offset + start * each.dtype.itemsize, each.dtype, (size,)), into[:size])
            for each, into in zip((first, second), buffers, strict=True)
        )
        read([one, other])
        if not torch.equal(one[1], other[1]):
            return False
    return True


def _twice(name: str, file: Path, other: str, other_file: Path) -> str:
    """The problem if both names in these files are of one tensor."""
    if name == other:
        return f"{name} is in both {file} and {other_file}: fetch the weights again"
    where = "" if file == other_file else f" in {file}"
    return f"{name}{where} and {other} in {other_file} are the same tensor of the model: fetch the weights again"


def _tying(name: str) -> str:
    """Advice for a tensor that is missing."""
    if name != TIED_HEAD:
        return ""
    return (
        "; if the embedding is the head, set tie_word_embeddings to true in config.json. A model without a head, such "
        "as a classifier, cannot be trained here"
    )


def _ignored(name: str, spec: ModelSpec) -> bool:
    return name.endswith(BUFFERS) or (spec.tied and name == TIED_HEAD)


def find_files(directory: Path) -> list[Path]:
    """The checkpoint's shards. Raises UserError if there are none, or if the index is wrong."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not directory.is_dir():
        raise UserError(f"the model's folder {directory} does not exist: restore it")
    if not (directory / INDEX).is_file():
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
        hint = "; pickled weights are not read: convert them to safetensors" if pickled else ""
        raise UserError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint or how_to_complete(directory)}")
    weight_map = read_config(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{directory / INDEX} has no weight_map of tensor names to files")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise UserError(f"{directory / INDEX} points outside its directory: {outside[0]}")
    if absent := [name for name in names if not os.path.isfile(directory / name)]:  # also for impossible names
        raise UserError(
            f"{directory} lacks {len(absent)} of {len(names)} shards: {', '.join(absent)}{how_to_complete(directory)}"
        )
    return [directory / name for name in names]


def _nbytes(entry: Entry) -> int:
    shape, dtype = entry
    return prod(shape) * dtype.itemsize


def _shards(entries: Mapping[str, Entry], max_bytes: float) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name, entry in entries.items():
        needed = _nbytes(entry)
        if shard and size + needed > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += needed
    if shard:
        yield shard


def _write_json(file: Path, value: Any) -> None:
    with naming(file), file.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
