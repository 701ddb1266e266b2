"""The model card of a result: what it is, what it was trained on and how, and how to load it.

A card is public. It names no local paths, and of the config only the keys of SHOWN.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, metadata_load
from yaml import YAMLError

from rptrain import __version__
from rptrain.checkpoint.export_progress import ADAPTER_CONFIG, loading_code
from rptrain.checkpoint.run_states import recorded
from rptrain.config.schema import Config
from rptrain.models.base_files import CONFIG
from rptrain.models.locate import HUB_ID, PRESETS, hub_id_of, locate
from rptrain.runs.folder.run_dir import RunDir, resolve_config
from rptrain.runs.view.run_view import RunView
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.text import one_line
from rptrain.utils.units import format_loss

NAME = "README.md"
BUILT_IN = "builtin:"
KINDS = {
    "adapter": "An adapter in PEFT's format",
    "finetune": "A language model",
    "quantized": "A language model in GGUF format",
}
LIBRARIES = {"adapter": "peft", "finetune": "transformers"}
LICENSE = ("license", "license_name", "license_link")
# Keys of the config that are shown. None of them holds a path or a text that was written for this machine alone.
SHOWN = (
    *("model.dtype", "data.max_length", "data.packing", "data.assistant_only_loss", "data.overlong"),
    *("train.method", "train.global_batch_size", "train.num_epochs", "train.max_steps", "train.seed"),
    *("lora.r", "lora.lora_alpha", "lora.lora_dropout", "lora.target_modules", "lora.target_parameters"),
    *("lora.modules_to_save", "lora.use_rslora", "lora.use_dora", "lora.base"),
    *("optim.learning_rate", "optim.lr_scheduler_type", "optim.warmup_steps", "optim.weight_decay", "optim.betas"),
    *("optim.eps", "optim.max_grad_norm", "optim.moments", "optim.update", "engine.fp8", "engine.fp16_accumulation"),
)


@dataclass(frozen=True)
class Base:
    """The model that was trained. `hub_id` and `folder` are None if they are unknown, `named` has no local path."""

    named: str
    hub_id: str | None
    folder: Path | None


def base_of(path: str) -> Base:
    """The base model that a config or an adapter names: a hub id, a folder of the hub's cache, or another folder."""
    place = expanded(path)
    if place.is_dir():
        hub_id = hub_id_of(place)
        return Base(hub_id or place.absolute().name, hub_id, place)
    if place.is_absolute() or (len(place.parts) > 1 and place.parent.is_dir()):  # it is gone
        hub_id = hub_id_of(place)
        return Base(hub_id or place.name, hub_id, None)
    try:
        folder = locate(path)
    except UserError:  # an adapter can be pushed without its base
        folder = None
    return Base(path, path if HUB_ID.fullmatch(path) else None, folder)


def base_path(run: Path) -> str | None:
    """What a run's config names as its model; None if it began with random weights. UserError if it cannot be read."""
    config = resolve_config(RunDir(run).config_path).config
    try:
        is_preset = locate(config.model.path).parent == PRESETS
    except UserError:  # it is gone
        is_preset = False
    return None if is_preset or config.model.init == "random" else config.model.path


def write(folder: Path, name: str, run: Path | None, base: Base | None) -> str:
    """The card of the model or adapter in a folder, which becomes the repository `name`, with YAML metadata.

    `run` trained it; None: unknown. UserError if the run's config cannot be read.
    """
    config = resolve_config(RunDir(run).config_path).config if run else None
    sources = [_source(source.path) for source in config.data.train] if config else []
    kind = _kind(folder)
    data = ModelCardData(
        library_name=LIBRARIES.get(kind),
        base_model=base.hub_id if base else None,
        base_model_relation=kind if base and base.hub_id else None,
        datasets=[hub_id for _, hub_id in sources if hub_id] or None,
        pipeline_tag="text-generation",
        tags=["rptrain", *([_method(config)] if config else [])],
        **(_license(base.folder) if base and base.folder else {}),
    )
    paragraphs = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name.partition('/')[2]}",
        " ".join(_about(folder, base, config)),
        *_training(folder, run, config, [named for named, _ in sources]),
        _use(folder, name, base),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _kind(folder: Path) -> str:
    """What a folder holds, as the hub calls its relation to the base model."""
    if (folder / ADAPTER_CONFIG).is_file():
        return "adapter"
    return "finetune" if (folder / CONFIG).is_file() else "quantized"


def _use(folder: Path, name: str, base: Base | None) -> str:
    """How to load it."""
    if _kind(folder) == "quantized":
        return f"## Use\n\n```sh\nollama run hf.co/{name}\nllama-cli -hf {name}\n```"
    return f"## Use\n\n```python\n{loading_code(folder, name, base.hub_id if base else None)}\n```"


def _method(config: Config) -> str:
    if config.adapters is None:
        return "full-finetuning"
    return "lora" if config.adapters.base == "bf16" else "qlora"


def _about(folder: Path, base: Base | None, config: Config | None) -> Iterator[str]:
    kind = KINDS[_kind(folder)]
    shown = None if base is None else f"[{base.hub_id}]({_page(base.hub_id)})" if base.hub_id else f"`{base.named}`"
    yield f"{kind}, trained {f'from {shown} ' if shown else ''}with rptrain {__version__}."
    if config and base is None:
        yield "It began with random weights."
    if base and base.hub_id and not (base.folder and _license(base.folder)):
        yield "See the base model for its license."


def _page(hub_id: str) -> str:
    return f"https://huggingface.co/{hub_id}"


def _training(folder: Path, run: Path | None, config: Config | None, sources: list[str]) -> Iterator[str]:
    step, loss = recorded(folder)
    lines = [f"| steps | {step:,} |"] if step is not None else []
    if run and config:
        view = RunView(run)
        if view.loss is not None:
            lines.append(f"| last training loss | {format_loss(view.loss)} |")
        if loss is None and view.results.best and view.results.best.step == step:
            loss = view.results.best.score
    lines += [f"| validation loss | {format_loss(loss)} |"] if loss is not None else []
    if sources:
        yield "## Data\n\n" + "\n".join(f"- {source}" for source in sources)
    if lines:
        yield "## Results\n\n| | |\n| --- | --- |\n" + "\n".join(lines)
    if config:
        yield "## Training\n\n| key | value |\n| --- | --- |\n" + "\n".join(_rows(config))


def _rows(config: Config) -> Iterator[str]:
    """Rows of a table: the keys of SHOWN that have a value; max_steps overrides num_epochs."""
    sections: Mapping[str, Any] = config.model_dump()
    for key in SHOWN:
        section, _, name = key.partition(".")
        value = (sections[section] or {}).get(name)
        if value not in (None, ()) and not (key == "train.num_epochs" and config.train.max_steps):
            yield f"| {key} | {_shown(value)} |"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = (
        ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else value
    )
    return one_line(str(text)).replace("|", "\\|")


def _source(path: str) -> tuple[str, str | None]:
    """A data set in words, without local folders, and its hub id if it has one."""
    if path.startswith(BUILT_IN):
        return f"`{path}` of rptrain", None
    place = Path(path)
    for folder in (place, *place.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("datasets--"):
            hub_id = folder.parent.parent.name.removeprefix("datasets--").replace("--", "/", 1)
            return f"[{hub_id}](https://huggingface.co/datasets/{hub_id})", hub_id
    return f"`{one_line(place.name)}`, not published here", None


def _license(folder: Path) -> dict[str, Any]:
    """The license that the README.md of a model states, as metadata; empty if it states none."""
    try:
        found = metadata_load(folder / NAME) if (folder / NAME).is_file() else None
    except (ValueError, YAMLError, RecursionError):
        return {}
    return {key: found[key] for key in LICENSE if key in found} if isinstance(found, dict) else {}
