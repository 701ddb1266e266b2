"""The settings on the New run screen, by group; help lines and choices come from the config's schema."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args, get_origin

from rptrain.config.schema import keys

_NUMBER = re.compile(r"\.(\d+)\.")  # of a data set in a key, from 0
_LISTED = frozenset({"model.path", "data.train.path", "data.val.path"})


@dataclass(frozen=True)
class Field:
    """A key of the config with its label. `when`: the method to which it belongs."""

    key: str
    label: str
    when: str = ""
    choices: tuple[str, ...] = ()  # for a key without choices in the schema, or in another order

    @property
    def id(self) -> str:
        return self.key.replace(".", "-")

    @property
    def name(self) -> str:
        """The key in the tree of the config."""
        return schema_name(self.key)

    @property
    def train_set(self) -> int | None:
        """The number of the training set that it belongs to, from 0."""
        found = _NUMBER.search(self.key)
        return int(found[1]) if found and self.key.startswith("data.train.") else None

    @property
    def is_grouped(self) -> bool:
        """Whether it belongs to one of the GROUPS."""
        return self in FIELDS or (self.train_set is not None and self in set_fields(self.train_set))

    @property
    def is_listed(self) -> bool:
        """Whether its values can be chosen from what is on this machine."""
        return self.name in _LISTED

    @property
    def about(self) -> str:
        return keys()[self.name].description or ""

    @property
    def placeholder(self) -> str:
        """The value if nothing is entered: the default, or the meaning of an unset key."""
        return self.default or self.about.partition("unset: ")[2].partition(";")[0]

    @property
    def default(self) -> str:
        field = keys()[self.name]
        if field.is_required() or field.default in (None, ()):
            return ""
        value = field.default
        return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def options(self) -> tuple[str, ...]:
        """The choices; empty if the value is typed."""
        if self.choices:
            return self.choices
        annotation = keys()[self.name].annotation
        if get_origin(annotation) is tuple:  # several choices allowed
            return ()
        for candidate in (annotation, *get_args(annotation)):
            if get_origin(candidate) is Literal and "auto" not in get_args(candidate):
                return get_args(candidate)
        return ("true", "false") if annotation is bool else ()


def schema_name(key: str) -> str:
    """A key without the number of a data set."""
    return _NUMBER.sub(".", key)


def set_fields(number: int) -> tuple[Field, ...]:
    """The settings of a training set, from 0."""
    place = f"data.train.{number}"
    return (
        Field(f"{place}.path", f"data {number + 1}" if number else "data"),
        Field(f"{place}.weight", "  weight"),
        Field(f"{place}.format", "  format", choices=get_args(keys()["data.train.format"].annotation)),
    )


GROUPS: tuple[tuple[str, tuple[Field, ...]], ...] = (
    (
        "Model and data",
        (
            Field("model.path", "model"),
            *set_fields(0),
            Field("train.method", "method"),
            Field("lora.r", "rank", "lora"),
            Field("lora.lora_alpha", "alpha", "lora"),
            Field("lora.base", "base", "lora"),
            Field("lora.use_dora", "DoRA", "lora"),
        ),
    ),
    (
        "Length",
        (
            Field("train.num_epochs", "epochs"),
            Field("train.max_steps", "max steps"),
            Field("optim.learning_rate", "learning rate"),
            Field("optim.warmup_steps", "warm-up"),
        ),
    ),
    (
        "Batch",
        (
            Field("data.max_length", "sequence length"),
            Field("train.micro_batch_size", "micro-batch"),
            Field("train.global_batch_size", "batch size"),
        ),
    ),
    (
        "Devices and memory",
        (
            Field("engine.devices", "devices"),
            Field("optim.update", "update"),
            Field("optim.moments", "optimizer state"),
            Field("model.dtype", "weights", choices=("bfloat16", "float16", "float32")),
            Field("engine.vram_limit", "GPU limit"),
            Field("engine.host_limit", "host limit"),
        ),
    ),
    (
        "Output",
        (
            Field("log.run_name", "name"),
            Field("save.output_dir", "folder"),
            Field("save.save_steps", "save every"),
            Field("save.save_total_limit", "keep"),
        ),
    ),
    (
        "Evaluation",
        (
            Field("data.val_size", "validation"),
            Field("train.eval_steps", "evaluate every"),
            Field("train.early_stopping_patience", "patience"),
            Field("save.load_best_model_at_end", "keep best"),
            Field("log.report_to", "trackers"),
        ),
    ),
)
FIELDS = tuple(field for _, fields in GROUPS for field in fields)


def _all() -> Iterator[Field]:
    """A field for every key; for data sets, those of the first one."""
    known = {field.key: field for field in FIELDS}
    for name in keys():
        key = name.replace("data.train.", "data.train.0.").replace("data.val.", "data.val.0.")
        yield known.get(key) or Field(key, name)


ALL = {field.key: field for field in _all()}


def field_of(key: str) -> Field | None:
    """The field of a key, of any data set; None if the config has no such key."""
    if key in ALL or not (found := _NUMBER.search(key)):
        return ALL.get(key)
    if key.startswith("data.train.") and (known := {field.key: field for field in set_fields(int(found[1]))}.get(key)):
        return known
    first = ALL.get(_NUMBER.sub(".0.", key))
    return replace(first, key=key, label=f"{first.label} {int(found[1]) + 1}") if first else None
