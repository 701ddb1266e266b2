"""The models that can answer: a run's, a checkpoint's, or that of a directory; found and checked before they load."""

import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.checkpoint import adapter, checked, frozen
from rptrain.checkpoint.atomic_dir import BASE, MANIFEST, Damaged
from rptrain.checkpoint.consistent import read_model
from rptrain.checkpoint.export_progress import base_format
from rptrain.checkpoint.frozen import tensors_in
from rptrain.checkpoint.metadata import RUN_CONFIG
from rptrain.checkpoint.result import answering
from rptrain.checkpoint.run_states import EXPORTED, recorded
from rptrain.checkpoint.state import dtype_of, unusable
from rptrain.checkpoint.unit_reader import UnitReader
from rptrain.data.eos import eos_ids, generation_eos
from rptrain.data.loader import VOCABULARIES
from rptrain.kernels.quant import Quantized
from rptrain.models.families import registry
from rptrain.models.locate import locate
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.lora import adapter_units, with_lora, without_adapters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import pretrained
from rptrain.models.weights.pretrained import WeightFiles
from rptrain.models.weights.safetensors_io import FLOATS, read_header
from rptrain.utils.dtypes import DTYPES
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.parallel import in_parallel
from rptrain.utils.phases import phase

EXTENDED = 8  # training and YaRN may extend a context to this multiple of max_position_embeddings


class Model(NamedTuple):
    """A model that is checked and not loaded yet."""

    spec: ModelSpec
    dtype: torch.dtype
    source: Path  # the directory of its weights: an exported model, an adapter or a checkpoint
    tokenizer: Path  # the directory of the tokenizer
    load: Callable[[Sequence[Tensor]], None]  # fills the bytes of each unit, which are zeros, with checked weights
    base: str = ""  # the directory of the model that was fine-tuned in full; empty: none, or unknown
    eos_ids: frozenset[int] = frozenset()  # those that its files name
    state: str = ""  # of its run, such as "step 4"; empty: unknown

    @property
    def nbytes(self) -> int:
        return self.spec.weight_bytes(self.dtype)

    @property
    def longest(self) -> int | None:
        """The most tokens of a prompt; None if the model does not say."""
        positions = self.spec.text_config.get("max_position_embeddings")
        return EXTENDED * positions if isinstance(positions, int) else None

    @property
    def has_adapters_only(self) -> bool:
        """Whether the same weights without adapters are the base model's."""
        own = len(self.spec.units) - len(adapter_units(self.spec))
        return own < len(self.spec.units) and not any(unit.trainable for unit in self.spec.units[:own])

    def ends(self, tokenizer: Any) -> set[int]:
        """The token ids that end an answer: those of the model's files and the tokenizer's."""
        return {end for end in (*self.eos_ids, tokenizer.eos_token_id) if end is not None}


def find_model(source: Path) -> Model:
    """The model of a run, which is its result, of a checkpoint or of a directory.

    Raises UserError for anything else, for a model that is incomplete or damaged, and for an exported model that is a
    link out of its run.
    """
    source = Path(source)
    if (source / adapter.CONFIG).is_file():
        found = _from_adapter(source)
    elif (source / "config.json").is_file():
        found = _from_directory(source, registry.build(registry.model_config(source)))
    elif (source / MANIFEST).is_file():
        return _from_checkpoint(source)
    else:
        path, sentence = answering(source)
        return find_model(path)._replace(state=sentence)
    if (step := recorded(source)[0]) is not None:
        found = found._replace(state=f"step {step}")
    if found.base or source.name != EXPORTED:
        return found
    return found._replace(base=_trained_from(source.absolute().parent))


def find_base(model: Model) -> Model:
    """The model that was fine-tuned in full. Raises UserError if it is unknown, or not on this machine."""
    if not model.base:
        raise UserError(f"the base model of {model.source} is not known: its run does not name one")
    try:
        directory = locate(model.base)
        if not any((directory / name).is_file() for name in (pretrained.SINGLE, pretrained.INDEX)):
            raise UserError(f"{directory} has no weights; the run began with random ones")
        spec = registry.build(registry.model_config(directory))
        has_adapter = (model.source / adapter.CONFIG).is_file()
        return _from_directory(directory, spec, (model.source, model.spec) if has_adapter else None)
    except UserError as error:
        raise UserError(f"the base model cannot be loaded: {error}") from None


def _trained_from(run: Path) -> str:
    """The model.path of a run's config; empty if it cannot be read."""
    try:
        named = tomllib.loads(read_small_text(run / RUN_CONFIG))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return named if isinstance(named, str) else ""


def _from_adapter(source: Path) -> Model:
    """An adapter with its base model, which is located by name, and quantized as in the run that exported it."""
    files = adapter.read(source)
    try:
        base = locate(files.config.base_model_name_or_path or "")
    except UserError as error:
        raise UserError(
            f"the adapter's base model was not found: set base_model_name_or_path in {source / adapter.CONFIG} to its "
            f"directory ({error})"
        ) from None
    own = registry.build(registry.model_config(base))
    try:
        spec = with_base(with_lora(own, adapter.settings_of(files, own)), base_format(source))
        model = _from_directory(base, spec, (source, spec))
        adapter.check(files, model.spec)
    except UserError as error:
        raise UserError(f"the adapter {source} cannot be used with {base}: {error}") from None

    def load(flats: Sequence[Tensor]) -> None:
        states = checked.check_files(source, [source / adapter.WEIGHTS])
        model.load(flats)
        into = tensors_in(model.spec, flats, model.dtype)
        adapter.load(files, model.spec, lambda unit, name: _plain(into(unit, name)))
        checked.check_states(states)

    has_tokenizer = any((source / name).is_file() for name in VOCABULARIES)
    ends = model.eos_ids | {*generation_eos(source)}
    tokenizer = source if has_tokenizer else base
    return model._replace(source=source, tokenizer=tokenizer, load=load, base=str(base), eos_ids=ends)


def _from_directory(source: Path, spec: ModelSpec, adapted: tuple[Path, ModelSpec] | None = None) -> Model:
    """A model directory. Adapters of `spec` stay zeros. `adapted`: the directory of the adapter that was trained on
    this base, and the model with it.
    """
    own = without_adapters(spec)
    files = pretrained.check(source, own)
    settings = (config.get(key) for config in (spec.config, spec.text_config) for key in ("dtype", "torch_dtype"))
    name = next(filter(None, settings), None)
    if name and str(name) not in DTYPES:
        raise UserError(f"{source / 'config.json'}: unknown dtype {str(name)!r}; use one of {', '.join(DTYPES)}")
    dtype = DTYPES[str(name)] if name else _stored_dtype(files)

    def load(flats: Sequence[Tensor]) -> None:
        known = checked.recorded(source, files.stamps)
        if adapted is not None:
            directory, whole = adapted
            known += checked.recorded_base(directory, source, whole, files.tensors)
        checked.load(files, own, tensors_in(spec, flats, dtype), known)

    return Model(spec, dtype, source, source, load, eos_ids=eos_ids(source, spec.config, None))


def _stored_dtype(files: WeightFiles) -> torch.dtype:
    """The type of the first floating-point tensor, by file and name, as transformers chooses it."""
    headers = map(read_header, files.stamps)
    dtypes = (header[name].dtype for header in headers for name in sorted(header))
    return next(dtype for dtype in dtypes if dtype in FLOATS.values())


def _from_checkpoint(checkpoint: Path) -> Model:
    state, spec = read_model(checkpoint)
    dtype = dtype_of(state)

    def load(flats: Sequence[Tensor]) -> None:
        def read(reader: UnitReader, index: int) -> None:
            reader.read(index, flats[index].view(spec.units[index].dtype_in(dtype)))

        try:
            reader = UnitReader(checkpoint, state, spec)
            with phase("reading weights", reader.nbytes, reads=True):
                in_parallel(partial(read, reader), [index for index, unit in enumerate(spec.units) if unit.trainable])
        except Damaged as error:
            raise unusable(checkpoint, error) from error
        if spec.frozen:
            frozen.load(state["meta"], spec, dtype, flats)

    base, meta = checkpoint / BASE, state["meta"]
    ends = eos_ids(base, spec.config, None) | {*meta.get("ends", ())}
    trained_from = str(meta.get("model_dir") or "")
    return Model(spec, dtype, checkpoint, base, load, trained_from, ends, f"step {state['step']}")


def _plain(parameter: Tensor | Quantized) -> Tensor:
    assert isinstance(parameter, Tensor)
    return parameter
