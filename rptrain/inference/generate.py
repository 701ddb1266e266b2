"""Text generation with a trained model: a run, a checkpoint, or a model directory."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rptrain.checkpoint import adapter
from rptrain.checkpoint.base_files import BASE
from rptrain.checkpoint.export import DTYPES, checkpoint_of, from_checkpoint
from rptrain.data.loader import VOCABULARIES, load_tokenizer
from rptrain.engine.store import available_bytes
from rptrain.inference.evaluate import encode_prompt
from rptrain.models import registry
from rptrain.models.adapters.lora import with_lora, without_adapters
from rptrain.models.layers.generate import cache_bytes, generate
from rptrain.models.spec import ModelSpec
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes

ROOM = 0.8  # fraction of a GPU's free memory for weights; the rest is for the cache and temporaries


def generate_text(
    source: Path, prompts: list[str], max_new_tokens: int, temperature: float, seed: int, raw: bool
) -> list[str]:
    """One answer for each prompt. `raw` continues the prompt itself instead of putting it into the chat template.

    A run answers from its exported model if it has one, otherwise from its newest checkpoint. Raises UserError for
    a source that is neither a run, a checkpoint nor a model directory.
    """
    source = Path(source)
    for number, prompt in enumerate(prompts, 1):
        if prompt != prompt.encode(errors="replace").decode():
            raise UserError(f"prompt {number} is not UTF-8 text")
    if any((source / "model" / name).is_file() for name in ("config.json", adapter.CONFIG)):
        source = source / "model"
    if (source / adapter.CONFIG).is_file():
        spec, parameters, base = _from_adapter(source)
    elif (source / "config.json").is_file():
        spec, parameters, base = _from_directory(source)
    else:
        checkpoint = checkpoint_of(source)
        base = checkpoint / BASE
        spec, view = from_checkpoint(checkpoint)
        parameters = _gather(spec, view)
    tokenizer = load_tokenizer(base)
    device = _device(spec, parameters)
    placed = [{name: tensor.to(device) for name, tensor in unit.items()} for unit in parameters]
    encoded = [
        tokenizer(prompt, verbose=False)["input_ids"]
        if raw or not tokenizer.chat_template
        else encode_prompt(tokenizer, prompt)
        for prompt in prompts
    ]
    _check_cache(spec, encoded, max_new_tokens, placed[0]["embed"])
    ends = _end_tokens(spec, tokenizer)
    answers = generate(spec, placed.__getitem__, encoded, max_new_tokens, ends, temperature, seed)
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def _from_adapter(source: Path) -> tuple[ModelSpec, list[dict[str, Tensor]], Path]:
    """Loads an adapter with its base model, which is located by name."""
    files = adapter.read(source)
    try:
        base = registry.locate(files.config.get("base_model_name_or_path") or "")
    except UserError as error:
        raise UserError(
            f"the adapter's base model was not found: set base_model_name_or_path in {source / adapter.CONFIG} to its "
            f"directory ({error})"
        ) from None
    own = registry.build(registry.read_config(base))
    spec = with_lora(own, adapter.settings_of(files, own))
    adapter.check(files, spec)
    parameters = _load(base, spec)
    adapter.load(files, spec, lambda unit, name: parameters[unit][name])
    tokenizer = any((source / name).is_file() for name in VOCABULARIES)
    return spec, parameters, source if tokenizer else base


def _from_directory(source: Path) -> tuple[ModelSpec, list[dict[str, Tensor]], Path]:
    spec = registry.build(registry.read_config(source))
    return spec, _load(source, spec), source


def _load(source: Path, spec: ModelSpec) -> list[dict[str, Tensor]]:
    """Loads the parameters of each unit; adapters are zeros."""
    own = without_adapters(spec)
    files = pretrained.check(source, own)
    name = str(spec.config.get("dtype") or spec.config.get("torch_dtype") or "bfloat16")
    if name not in DTYPES:
        raise UserError(f"{source / 'config.json'}: unknown dtype {name!r}; use one of {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    parameters = [unit.views(torch.zeros(unit.numel, dtype=dtype)) for unit in spec.units]
    pretrained.load(files, own, lambda unit, name: parameters[unit][name])
    return parameters


def _gather(spec: ModelSpec, view: pretrained.View) -> list[dict[str, Tensor]]:
    return [{param.name: view(i, param.name) for param in unit.params} for i, unit in enumerate(spec.units)]


def _device(spec: ModelSpec, parameters: list[dict[str, Tensor]]) -> torch.device:
    if torch.cuda.is_available():
        needed = sum(tensor.nbytes for unit in parameters for tensor in unit.values())
        if needed < ROOM * torch.cuda.mem_get_info()[0]:
            return torch.device("cuda")
    return torch.device("cpu")


def _check_cache(spec: ModelSpec, prompts: list[list[int]], max_new_tokens: int, table: Tensor) -> None:
    """Raises UserError if the keys and values of all tokens do not fit the memory that is left."""
    longest = max(map(len, prompts), default=0) + max_new_tokens
    needed = cache_bytes(spec, len(prompts), longest, table.dtype)
    left = torch.cuda.mem_get_info()[0] if table.is_cuda else available_bytes()
    if needed > left:
        raise UserError(
            f"prompts and answers of up to {longest:,} tokens need {format_bytes(needed)} for keys and values; "
            f"{format_bytes(left)} is available: lower --max-new-tokens or give fewer prompts"
        )


def _end_tokens(spec: ModelSpec, tokenizer: Any) -> set[int]:
    """The token ids that end an answer, from the tokenizer and the config."""
    named = spec.config.get("eos_token_id")
    ends = {*named} if isinstance(named, list) else {named}
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}
