"""Text generation with a trained model: a run, a checkpoint, or a model directory."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rptrain.checkpoint import adapter
from rptrain.checkpoint.base_files import BASE
from rptrain.checkpoint.export import DTYPES, checkpoint_of, from_checkpoint
from rptrain.checkpoint.state import dtype_of, read_state
from rptrain.data.loader import VOCABULARIES, load_tokenizer
from rptrain.data.tokens import tokenized
from rptrain.engine.store import available_bytes
from rptrain.inference.evaluate import in_template
from rptrain.models import registry
from rptrain.models.adapters.lora import with_lora, without_adapters
from rptrain.models.layers.generate import cache_bytes, generate
from rptrain.models.spec import ModelSpec
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from rptrain.utils.text import counted
from rptrain.utils.units import format_bytes

EXTENDED = 8  # training and YaRN may extend a context to this multiple of max_position_embeddings
ROOM = 0.8  # fraction of free memory for weights, keys and values; the rest is for temporaries


def generate_text(
    source: Path, prompts: list[str], max_new_tokens: int, temperature: float, seed: int, raw: bool
) -> list[str]:
    """One answer for each prompt. `raw` continues the prompt itself instead of putting it into the chat template.

    A run answers from its exported model if it has one, otherwise from its newest checkpoint. Raises UserError for
    a source that is neither a run, a checkpoint nor a model directory.
    """
    source = Path(source)
    if not isfinite(temperature):
        raise UserError(f"--temperature must be a finite number, not {temperature}")
    for number, prompt in enumerate(prompts, 1):
        if prompt != prompt.encode(errors="replace").decode():
            raise UserError(f"prompt {number} is not UTF-8 text")
    if any((source / "model" / name).is_file() for name in ("config.json", adapter.CONFIG)):
        source = source / "model"
    model = _model(source)
    tokenizer = load_tokenizer(model.base)
    raw = raw or not tokenizer.chat_template
    try:
        texts = prompts if raw else in_template(tokenizer, prompts)
    except UserError as error:
        raise UserError(f"{model.base}: {error}; --raw continues a prompt without the chat template") from error
    encoded = [tokenized(tokenizer, text, add_special_tokens=raw)["input_ids"] for text in texts]
    _check_lengths(model.spec, encoded)
    device = _device(model, encoded, max_new_tokens)
    placed = [{name: tensor.to(device) for name, tensor in unit.items()} for unit in model.load()]
    ends = _end_tokens(model.spec, tokenizer)
    answers = generate(model.spec, placed.__getitem__, encoded, max_new_tokens, ends, temperature, seed)
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


class _Model(NamedTuple):
    """A model that is checked and not loaded yet."""

    spec: ModelSpec
    dtype: torch.dtype
    base: Path  # the directory of the tokenizer
    load: Callable[[], list[dict[str, Tensor]]]  # returns the parameters of each unit

    @property
    def nbytes(self) -> int:
        return sum(param.numel for unit in self.spec.units for param in unit.params) * self.dtype.itemsize


def _model(source: Path) -> _Model:
    if (source / adapter.CONFIG).is_file():
        return _from_adapter(source)
    if (source / "config.json").is_file():
        return _from_directory(source, registry.build(registry.read_config(source)))
    return _from_checkpoint(checkpoint_of(source))


def _from_adapter(source: Path) -> _Model:
    """An adapter with its base model, which is located by name."""
    files = adapter.read(source)
    try:
        base = registry.locate(files.config.base_model_name_or_path or "")
    except UserError as error:
        raise UserError(
            f"the adapter's base model was not found: set base_model_name_or_path in {source / adapter.CONFIG} to its "
            f"directory ({error})"
        ) from None
    own = registry.build(registry.read_config(base))
    try:
        model = _from_directory(base, with_lora(own, adapter.settings_of(files, own)))
        adapter.check(files, model.spec)
    except UserError as error:
        raise UserError(f"the adapter {source} cannot be used with {base}: {error}") from None

    def load() -> list[dict[str, Tensor]]:
        parameters = model.load()
        adapter.load(files, model.spec, lambda unit, name: parameters[unit][name])
        return parameters

    has_tokenizer = any((source / name).is_file() for name in VOCABULARIES)
    return model._replace(base=source if has_tokenizer else base, load=load)


def _from_directory(source: Path, spec: ModelSpec) -> _Model:
    """A model directory. Adapters of `spec` are loaded as zeros."""
    own = without_adapters(spec)
    files = pretrained.check(source, own)
    name = str(spec.config.get("dtype") or spec.config.get("torch_dtype") or "bfloat16")
    if name not in DTYPES:
        raise UserError(f"{source / 'config.json'}: unknown dtype {name!r}; use one of {', '.join(DTYPES)}")
    dtype = DTYPES[name]

    def load() -> list[dict[str, Tensor]]:
        parameters = [unit.views(torch.zeros(unit.numel, dtype=dtype)) for unit in spec.units]
        pretrained.load(files, own, lambda unit, name: parameters[unit][name])
        return parameters

    return _Model(spec, dtype, source, load)


def _from_checkpoint(checkpoint: Path) -> _Model:
    spec, view = from_checkpoint(checkpoint)

    def load() -> list[dict[str, Tensor]]:
        return [{param.name: view(i, param.name) for param in unit.params} for i, unit in enumerate(spec.units)]

    return _Model(spec, dtype_of(read_state(checkpoint)), checkpoint / BASE, load)


def _check_lengths(spec: ModelSpec, prompts: list[list[int]]) -> None:
    """Raises UserError if a prompt is far longer than any that the model was made for."""
    positions = spec.config.get("max_position_embeddings")
    for number, prompt in enumerate(prompts, 1):
        if isinstance(positions, int) and len(prompt) > EXTENDED * positions:
            raise UserError(
                f"prompt {number} has {len(prompt):,} tokens, more than {EXTENDED} times the model's "
                f"max_position_embeddings ({positions:,}): shorten it"
            )


def _device(model: _Model, prompts: list[list[int]], max_new_tokens: int) -> torch.device:
    """The first GPU if weights, keys and values fit there, otherwise the CPU. Raises UserError if they do not."""
    longest = max(map(len, prompts), default=0) + max_new_tokens
    cache = cache_bytes(model.spec, len(prompts), longest, model.dtype)
    needed = model.nbytes + cache
    if torch.cuda.is_available() and needed < ROOM * torch.cuda.mem_get_info()[0]:
        return torch.device("cuda")
    if needed > ROOM * available_bytes():
        raise UserError(
            f"the model takes {format_bytes(model.nbytes)}, and keys and values of up to {longest:,} tokens in "
            f"{counted(len(prompts), 'sequence')} {format_bytes(cache)}; {format_bytes(available_bytes())} is "
            "available: lower --max-new-tokens, give fewer prompts, or free memory"
        )
    return torch.device("cpu")


def _end_tokens(spec: ModelSpec, tokenizer: Any) -> set[int]:
    """The token ids that end an answer, from the tokenizer and the config."""
    named = spec.config.get("eos_token_id")
    ends = {*named} if isinstance(named, list) else {named}
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}
