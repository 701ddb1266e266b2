"""Reading a decoder's shape from a Hugging Face config.json; unsupported settings are errors."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from reprlib import repr as shortened
from typing import Any

from rptrain.kernels.causal_conv import MAX_WIDTH
from rptrain.kernels.delta_tiles import MAX_KEY_SIZE
from rptrain.kernels.flash import MAX_HEAD_SIZE
from rptrain.models.layer import Rotary
from rptrain.models.layers import rope
from rptrain.utils.errors import UserError

# more is a mistake, and would use all memory before it is noticed
LIMITS: Mapping[str | type, float] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_hidden_layers": 1_000,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": MAX_HEAD_SIZE,  # of the kernels of attention
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 4096,
    "num_nextn_predict_layers": 1_000,
    "num_mtp_modules": 1_000,
    "linear_num_key_heads": 4096,
    "linear_num_value_heads": 4096,
    "linear_key_head_dim": MAX_KEY_SIZE,
    "linear_value_head_dim": MAX_HEAD_SIZE,
    "linear_conv_kernel_dim": MAX_WIDTH,
    int: 1 << 30,  # of every other key
    float: rope.LARGEST,
}

TO_16_BITS = (
    "AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config=FineGrainedFP8Config(dequantize=True), "
    "dtype='bfloat16').save_pretrained(COPY)"
)
KINDS = ("sliding_attention", "full_attention")  # of layer_types


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    std: float
    tied: bool
    padding_row: int | None  # see ModelShape


@dataclass(frozen=True)
class Shape(Sizes):
    """The sizes of a Llama-like decoder, and its rotary positions, by the layers' `rotary`."""

    rotaries: tuple[Rotary, ...]


def with_defaults(
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    found: list[str],
    nullable: Collection[str] = (),
    aliases: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """The config, with defaults for missing keys and for `rope_parameters` that are null.

    The null of a `nullable` key is a value. That of another key with a default is a problem, which is added to `found`.
    `aliases` are pairs of keys for one setting, of which either may be given. The first one wins, as in transformers.
    """
    given = dict(config)
    for first, second in aliases:
        if first in given:
            given[second] = given[first]
        elif second in given:
            given[first] = given[second]
    for key, default in defaults.items():
        if given.get(key, default) is None and default is not None and key not in nullable:
            found += [_null(key)] if key != "rope_parameters" else []
            given[key] = default
    return {**defaults, **given}


def read_shape(
    config: Mapping[str, Any],
    unsupported: list[str] | None = None,
    *,
    biases: bool = False,
    quantized: str | None = None,
    ropes: Sequence[Mapping[str, Any]] | None = None,
    partial: bool = False,
    query_scaling: bool = False,
) -> Shape:
    """The shape of a decoder, or a UserError that lists every problem.

    `unsupported`: problems that the caller found. `biases`: whether attention has them. `quantized`: the `quant_method`
    of weights that can be read nevertheless. `ropes`: the settings of several rotary positions; None: those of the
    config. `partial`: whether they may be of a part of a head's columns. `query_scaling`: whether queries may be scaled
    by their positions.
    """
    found = list(unsupported or [])
    sizes = read_sizes(config, found)
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act {activation!r} is not supported; silu is")
    if read_flag(config, "attention_bias", found, biases) != biases:
        must = "on" if biases else "off"
        found.append(f"attention_bias {config['attention_bias']!r} is not supported; it must be {must}")
    if read_flag(config, "mlp_bias", found):
        found.append("mlp_bias True is not supported; it must be off")
    if config.get("attention_dropout"):
        found.append(f"attention_dropout {config['attention_dropout']!r} is not supported; it must be off")
    if (stored := config.get("quantization_config")) and not (
        quantized and isinstance(stored, Mapping) and stored.get("quant_method") == quantized
    ):
        found.append(f"quantization_config: the weights are quantized{_what_to_use(stored)}")
    ropes = [rope.parameters(config)] if ropes is None else ropes
    problems = (
        rope.problems(settings, sizes.head_size, partial=partial, query_scaling=query_scaling) for settings in ropes
    )
    found += (problem for each in problems for problem in each)
    if found:
        once = dict.fromkeys(found)  # a builder may read a key, too
        raise UserError("config.json describes a model that cannot be trained here:\n- " + "\n- ".join(once))
    return Shape(**asdict(sizes), rotaries=tuple(rope.rotary(settings, sizes.head_size) for settings in ropes))


def _what_to_use(stored: object) -> str:
    """How weights are quantized, by a quantization_config, and what to use in place of them."""
    settings = stored if isinstance(stored, Mapping) else {}
    method = settings.get("quant_method")
    if method == "fp8":
        block = settings.get("weight_block_size")
        scales = f"a scale for each block of {' × '.join(map(str, block))}" if isinstance(block, list) else "scales"
        return (
            f" to FP8 with {scales}, which cannot be read: write a copy in 16 bits with transformers, "
            f"{TO_16_BITS} (docs/guide/models.md, Weights in FP8)"
        )
    known = f" ({shortened(method)})" if method else ""
    return (
        f"{known}: use the 16-bit or 32-bit weights that they were made from; with adapters, lora.base quantizes those "
        "while they are loaded"
    )


def read_sizes(config: Mapping[str, Any], found: list[str]) -> Sizes:
    """The sizes. Problems are added to `found`; affected sizes are then meaningless."""
    before = len(found)
    sized = {key: config[key] for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None}
    hidden = read_number(config, "hidden_size", found)
    heads = read_number(config, "num_attention_heads", found)
    kv_heads = read_number(sized, "num_key_value_heads", found, heads)
    sound = len(found) == before  # placeholders of wrong values are never divisors
    if sound and heads % kv_heads:
        found.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if sound and "head_dim" not in sized and hidden % heads:
        found.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    size = read_number(sized, "head_dim", found, max(hidden // heads, 1))
    if len(found) == before and size % 2:
        found.append(f"head_dim must be even for rotary positions, not {size}")
    return Sizes(
        vocab=read_number(config, "vocab_size", found),
        hidden=hidden,
        intermediate=read_number(config, "intermediate_size", found),
        layers=read_number(config, "num_hidden_layers", found),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        eps=read_number(config, "rms_norm_eps", found, 1e-6, float),
        std=read_number(config, "initializer_range", found, 0.02, float),
        tied=read_flag(config, "tie_word_embeddings", found),
        padding_row=_read_padding_row(config, found),
    )


def _read_padding_row(config: Mapping[str, Any], found: list[str]) -> int | None:
    """The embedding's row for `pad_token_id`. A negative id counts from the end, as in torch.nn.Embedding."""
    row = config.get("pad_token_id")
    if row is None:
        return None
    if not isinstance(row, int) or isinstance(row, bool):
        found.append(f"pad_token_id must be a token id or null, not {shortened(row)}")
        return None
    return row if row >= 0 else read_number(config, "vocab_size", []) + row


def read_experts(config: Mapping[str, Any], key: str, found: list[str]) -> tuple[int, int]:
    """The number of experts under `key`, and of experts per token; problems are added to `found`."""
    before = len(found)
    experts = read_number(config, key, found)
    active = read_number(config, "num_experts_per_tok", found)
    if len(found) == before and active > experts:
        found.append(f"num_experts_per_tok {active} is more than {key} {experts}")
    return experts, active if len(found) == before else 1


def read_groups(config: Mapping[str, Any], experts: int, active: int, found: list[str]) -> tuple[int, int]:
    """The number of groups of experts, and of those that a token may reach; problems are added to `found`."""
    before = len(found)
    groups = read_number(config, "n_group", found, 1)
    kept = read_number(config, "topk_group", found, 1)
    if len(found) > before:
        return 1, 1
    if kept > groups:
        found.append(f"topk_group {kept} is more than n_group {groups}")
    elif experts % groups or (groups > 1 and experts // groups < 2):
        found.append(f"n_group {groups} must divide the {experts} experts into groups of at least 2")
    elif kept * (experts // groups) < active:
        found.append(f"{kept} of {groups} groups of experts have fewer than num_experts_per_tok {active}")
    return groups, kept


def read_windows(
    config: Mapping[str, Any], window: int | None, windowed: Sequence[bool], found: list[str]
) -> list[int | None]:
    """The window of each layer's attention, None for full attention; problems are added to `found`.

    `windowed`: the layers with the window if layer_types is missing.
    """
    kinds = read_layer_types(config, KINDS, [KINDS[0] if has else KINDS[1] for has in windowed], found)
    if window is None and "sliding_attention" in kinds:
        found.append("layer_types asks for sliding_attention, but no sliding window is on")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def read_layer_types(
    config: Mapping[str, Any], kinds: Sequence[str], default: Sequence[str], found: list[str]
) -> Sequence[str]:
    """One of these kinds for each layer; problems are added to `found`. `default`: if layer_types is missing."""
    given = config.get("layer_types")
    if given is None:
        return default
    if not isinstance(given, list) or len(given) != len(default) or not all(kind in kinds for kind in given):
        found.append(f"layer_types must name {' or '.join(kinds)} for each of {len(default)} layers")
        return []
    return given


def read_only(config: Mapping[str, Any], only: Mapping[str, Any], found: list[str]) -> None:
    """Adds to `found` the settings that have another value than their only supported one."""
    found += (
        f"{key} {config[key]!r} is not supported; {value!r} is"
        for key, value in only.items()
        if config.get(key, value) != value
    )


def read_number(
    config: Mapping[str, Any], key: str, found: list[str], default: Any = None, kind: type = int, *, least: int = 1
) -> Any:
    """A positive number, or a placeholder with a problem added to `found`, so that reading continues.

    `least` 0 allows zero.
    """
    value = config.get(key, default)
    accepted = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    most = LIMITS.get(key, LIMITS[kind])
    if accepted and (0 < value <= most or (least == 0 and value == 0)):
        return kind(value)
    what = "a positive whole number" if kind is int else "a positive number"
    what = f"{what} or 0" if least == 0 else what
    if value is None:
        found.append(f"{key} is missing" if default is None else _null(key))
    elif accepted and value > most:
        found.append(f"{key} is at most {most}, not {shortened(value)}")
    else:
        found.append(f"{key} must be {what}, not {value!r}")
    return 1


def read_flag(config: Mapping[str, Any], key: str, found: list[str], default: bool = False) -> bool:
    """A flag; a problem is added to `found` if it is neither true nor false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        found.append(_null(key) if value is None else f"{key} must be true or false, not {value!r}")
        return default
    return value


def _null(key: str) -> str:
    return f"{key} is null: remove it"
