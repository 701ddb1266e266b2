"""The settings on the New run screen, by group; help lines and choices come from the config's schema."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from rptrain.config.schema import keys


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
        return self.key.replace(".0.", ".")

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


GROUPS: tuple[tuple[str, tuple[Field, ...]], ...] = (
    (
        "Model and data",
        (
            Field("model.path", "model"),
            Field("data.train.0.path", "data"),
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
