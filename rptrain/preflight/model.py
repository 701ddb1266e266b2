"""The model that a config trains: its files, frozen parameters and adapters."""

from math import prod
from pathlib import Path

from rptrain.config.schema import Config, Lora
from rptrain.machine.hardware import Hardware, sums_at_half_rate
from rptrain.models.families import registry
from rptrain.models.locate import PRESETS, locate, read_config
from rptrain.models.spec import ModelShape, ModelSpec
from rptrain.models.transforms.balance import balanced
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.half_sums import with_half_sums
from rptrain.models.transforms.lora import LoRA, with_lora, without_adapters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import pretrained
from rptrain.models.weights.file_backed import pieces
from rptrain.utils.dtypes import DTYPES
from rptrain.utils.errors import UserError


def training_model(config: Config) -> tuple[Path, ModelSpec]:
    """The model's directory and spec. Raises UserError if there is none, or if [train] or [lora] does not fit it."""
    model_dir, spec = base_model(config)
    return model_dir, as_trained(spec, config)


def base_model(config: Config) -> tuple[Path, ModelSpec]:
    """The directory of the model that the config names, and its spec. Raises UserError if there is none."""
    model_dir = locate(config.model.path)
    if starts_from_files(config, model_dir):
        described = registry.model_config(model_dir)
    else:
        described = registry.text_only(read_config(model_dir))
    return model_dir, registry.build(described)


def as_trained(spec: ModelSpec, config: Config) -> ModelSpec:
    """The spec of a base model with adapters or frozen weights. Raises UserError if [train] or [lora] does not fit."""
    spec = balanced(spec, config.train.router_aux_loss_coef)
    if config.adapters is not None:
        spec = with_base(with_lora(spec, lora_settings(config.adapters)), config.adapters.base)
    else:
        spec = freeze(spec, config.train.freeze)
    return with_fp8(spec) if config.engine.fp8 else spec


def for_hardware(spec: ModelSpec, config: Config, hardware: Hardware) -> ModelSpec:
    """The model as the devices compute it: with float16 sums in kernels of ours where float32 sums are slow.

    engine.fp8 includes those of attention and the head for models in bfloat16, and engine.fp16_accumulation those and
    weight gradients for models in float16.
    """
    engine, dtype = config.engine, config.model.dtype
    wanted = (engine.fp8 and dtype == "bfloat16") or (engine.fp16_accumulation and dtype == "float16")
    return with_half_sums(spec) if wanted and sums_at_half_rate(hardware.machine.card) else spec


def trained_shape(config: Config, hardware: Hardware) -> ModelShape:
    """The model as a config trains it on this hardware. UserError if it cannot.

    Here, also if the files have no weights that adapters or model.hold need. On a hypothetical machine a preset stands
    for the model with its weights.
    """
    model_dir, spec = training_model(config)
    if hardware.here and config.adapters is not None and not starts_from_files(config, model_dir):
        raise UserError("adapters need pretrained weights")
    if hardware.here and config.model.hold == "map":
        find_files(config, model_dir, spec)
    return for_hardware(spec, config, hardware)


def lora_settings(lora: Lora) -> LoRA:
    """The settings of the [lora] table, without the source of an adapter and the format of the base."""
    return LoRA(**lora.model_dump(exclude={"adapter", "base"}))


def _is_preset(model_dir: Path) -> bool:
    return model_dir.parent == PRESETS


def starts_from_files(config: Config, model_dir: Path) -> bool:
    """Whether training starts from weights in files, which may be missing, and not from random ones."""
    return config.model.init == "auto" and (any(model_dir.glob("*.safetensors")) or not _is_preset(model_dir))


def carried_bytes(config: Config, spec: ModelShape) -> int:
    """Bytes of the tensors in the model's files that exports copy: models/weights/carried.py."""
    model_dir = locate(config.model.path)
    if not spec.carried or not starts_from_files(config, model_dir):
        return 0
    return sum(
        prod(stored.shape) * stored.dtype.itemsize
        for name, stored in pretrained.stored_tensors(model_dir).items()
        if spec.carries(name)
    )


def find_files(config: Config, model_dir: Path, spec: ModelSpec) -> pretrained.WeightFiles | None:
    """The files with the model's weights; None if the weights are random.

    Raises UserError if the tensors do not fit the model, or if `model.hold = "map"` needs files and there are none.
    """
    files = None
    if starts_from_files(config, model_dir):
        files = pretrained.check(model_dir, without_adapters(spec))
    if config.model.hold == "map" and files is None:
        raise UserError(
            f'model.hold = "map" needs files, and {config.model.path} starts from random weights, as every model in '
            '`rptrain bench` does: use model.hold = "memory"'
        )
    if config.model.hold == "map" and files is not None:
        pieces(files, spec, DTYPES[config.model.dtype])
    return files
