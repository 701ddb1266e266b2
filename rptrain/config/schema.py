"""The configuration of a run: a strict, frozen tree; the line under a field is its documentation."""

from collections.abc import Iterator
from hashlib import sha256
from math import frexp
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from rptrain.config.types import MAX_COUNT, Beta, Count, Devices, Names, Number, PathText, RunName, Size, Text

LOSS_SCALE, LOSS_SCALE_STEPS = 65536.0, 2000
AUTOMATIC = ("train.micro_batch_size", "engine.round_size")  # keys that can be "auto" until a run begins


def _mistake(key: str, message: str) -> PydanticCustomError:
    """A mistake in how keys go together, to be reported at `key`."""
    return PydanticCustomError("relation", "{text}", {"key": key, "text": message})


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Section):
    """The model to train."""

    path: PathText
    """a directory with a Hugging Face checkpoint, or the name of a bundled preset"""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """the type of the weights"""
    init: Literal["auto", "random"] = "auto"
    """"random" draws new weights; "auto" does so only where the preset has none"""
    hold: Literal["memory", "map"] = "memory"
    """"map": weights that stay as they are are read from the model's files whenever a GPU needs them"""


class TrainSet(Section):
    """A data set to train on."""

    path: PathText
    """a file, a folder of files or a pattern such as chats/*.jsonl, or builtin:tasks, or builtin:random"""
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca", "text"] = "auto"
    """how a row is written; "auto" looks"""
    split: Text = "train"
    """the part of the set to take, where it has parts"""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """how often the set is taken in an epoch; 0.5: half of it, and the other half in the next"""


class Data(Section):
    """What is read, and how it becomes tokens."""

    train: tuple[TrainSet, ...] = Field(min_length=1, strict=False)
    """the sets to train on"""
    val: tuple[TrainSet, ...] = Field(default=(), strict=False)
    """sets to measure the loss on, as [[data.val]]; unset: those of val_size"""
    val_size: NonNegativeFloat = 0.0
    """rows of the training sets to hold out for that; below 1: a share of them"""
    max_length: int = Field(2048, ge=2, le=MAX_COUNT)
    """tokens a row"""
    overlong: Literal["truncate", "split", "drop", "error"] = "truncate"
    """what becomes of a longer sample: it loses its end, becomes several, is left out, or stops the run"""
    packing: bool = True
    """put several samples in a row; they do not see each other"""
    assistant_only_loss: bool = True
    """learn the assistant's words only, not the questions"""
    chat_template: Text | None = None
    """a Jinja file to use instead of the tokenizer's template"""
    cache_dir: PathText | None = None
    """where tokenized files are kept for later runs; unset: ~/.cache/rptrain"""


class Eval(Section):
    """What is measured before and after training."""

    questions: int = Field(default=0, ge=0, le=100_000)
    """how many held-out questions of the built-in tasks to ask; 0: none"""


class Train(Section):
    """How long and in what portions to train."""

    method: Literal["full", "lora"] | None = None
    """"full": the weights are trained; "lora": adapters are; unset: adapters where there is a [lora] table"""
    freeze: tuple[Text, ...] = Field(default=(), strict=False)
    """tensors that stay as they are, by name in the checkpoint; "*" is any text: "model.layers.0.*"; unset: none"""
    micro_batch_size: Count | Literal["auto"] = 1
    """rows that go through the model together; "auto": what is planned to be fastest"""
    global_batch_size: Count = 16
    """rows a step; a multiple of micro_batch_size"""
    num_epochs: float = Field(default=1.0, gt=0, le=10**6)
    """passes over the data"""
    max_steps: Count | None = None
    """steps to train, whatever num_epochs says; unset: num_epochs counts"""
    eval_steps: NonNegativeInt = 0
    """steps between two measurements of the loss on held-out rows; 0: at the end"""
    early_stopping_patience: PositiveInt | None = None
    """measurements in a row without a lower loss after which the run ends; unset: it never does"""
    seed: NonNegativeInt = 0
    """of the order of the data and of new weights"""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """weight of the loss that keeps the load of experts even; unset: what config.json has with output_router_logits"""

    @property
    def sequences(self) -> int:
        """Sequences per micro-batch, once "auto" is resolved."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, once "auto" is resolved."""
        return self.global_batch_size // self.sequences

    @model_validator(mode="after")
    def _divides(self) -> "Train":
        rows, part = self.global_batch_size, self.micro_batch_size
        if part != "auto" and rows % part:
            raise _mistake("train.global_batch_size", f"{rows} is no multiple of train.micro_batch_size, {part}")
        return self


class Lora(Section):
    """Low-rank adapters, by PEFT's names; the model's own weights stay as they are."""

    r: Count = 8
    """the rank: columns of each adapter"""
    lora_alpha: Number = Field(default=8, le=MAX_COUNT)
    """an adapter's output is multiplied by lora_alpha / r"""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """share of an adapter's inputs that is left out, at random"""
    target_modules: Names = "all-linear"
    """"all-linear"; or names such as ["q_proj", "v_proj"]; or a pattern (regular expression) of whole names"""
    use_rslora: bool = False
    """multiply by lora_alpha / sqrt(r) instead"""
    use_dora: bool = False
    """DoRA: train the length of each row of an adapted weight too; needs lora_dropout = 0"""
    modules_to_save: tuple[Text, ...] = Field(default=(), strict=False)
    """modules that are trained whole, such as ["embed_tokens", "lm_head"]"""
    base: Literal["bf16", "nf4", "mxfp4", "int8"] = "bf16"
    """how the matrices that stay are held: in model.dtype, or in 4 or 8 bits and widened on the device"""
    target_parameters: tuple[Text, ...] = Field(default=(), strict=False)
    """of experts: "mlp.experts.gate_up_proj", "mlp.experts.down_proj"; needs lora_dropout = 0, no DoRA; unset: none"""
    adapter: PathText | None = None
    """the folder of an adapter by PEFT or rptrain to go on from, of the same settings; unset: a new one"""


class Optim(Section):
    """AdamW and its learning rate."""

    learning_rate: PositiveFloat = 1e-5
    """at its highest"""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    """how the learning rate goes on after the warm-up"""
    warmup_steps: NonNegativeFloat = 0.0
    """steps in which the learning rate rises; below 1: a share of all steps"""
    weight_decay: NonNegativeFloat = 0.0
    """pull of the matrices toward zero; norms have none"""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), strict=False)
    """decay of the averages of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """added to the divisor"""
    max_grad_norm: NonNegativeFloat = 1.0
    """a longer gradient is cut to this norm; 0: never"""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """how AdamW's averages are kept: 8 bytes a parameter, 4, or 2; the small ones are rounded at random"""
    loss_scale: float = LOSS_SCALE
    """with float16, what the loss is multiplied by at first, a power of two; halved when a gradient overflows"""
    loss_scale_steps: PositiveInt = LOSS_SCALE_STEPS
    """with float16, steps without overflow after which the loss scale doubles"""
    max_skipped_steps: PositiveInt = 20
    """steps in a row that may be skipped, as their gradients are not finite, before the run ends"""
    update: Literal["async", "sync"] = "async"
    """"async": weights are one step late and no device waits; "sync": exact"""

    @field_validator("loss_scale")
    @classmethod
    def _power_of_two(cls, scale: float) -> float:
        if scale < 1 or frexp(scale)[0] != 0.5:
            raise PydanticCustomError("value", "{text}", {"text": "must be a power of two, 1 or more"})
        return scale

    @model_validator(mode="after")
    def _warmup(self) -> "Optim":
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            raise _mistake(
                "optim.warmup_steps", f"{self.warmup_steps} is no whole number of steps, and no share below 1"
            )
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            raise _mistake(
                "optim.lr_scheduler_type",
                '"constant" has no warm-up: write "constant_with_warmup", or optim.warmup_steps = 0',
            )
        return self


class Engine(Section):
    """What of the machine may be used, and how."""

    devices: Devices = "auto"
    """"auto", "cuda" (all GPUs), "cuda:0,1" (these), or "cpu:N" for N workers on the CPU"""
    vram_limit: Size | None = None
    """of each GPU, such as "24GiB"; unset: what is free"""
    host_limit: Size | None = None
    """all that the process takes of the host's memory, such as "200GiB"; unset: what is free"""
    round_size: Count | Literal["auto"] | None = None
    """micro-batches a round, the same for the whole run; unset: all of a step; "auto": what is planned to be fastest"""
    optimizer_threads: PositiveInt | None = None
    """CPU threads of the optimizer; unset: by the number of cores"""
    fp16_accumulation: bool = False
    """with float16, let GPUs sum products in float16: faster on consumer cards, less exact"""
    replan: bool = True
    """measure the layers in the first steps and plan again with the times"""
    stall_timeout: float = Field(default=600.0, ge=0, le=10**9)
    """seconds without a step's end after which is told what every thread and stream waits for; 0: never"""
    trace: bool = False
    """record when each stage ran on each device"""


class Save(Section):
    """Where the run is kept, and how often."""

    output_dir: PathText = "runs"
    """the folder of all runs, with a folder for each"""
    save_steps: NonNegativeInt = 0
    """steps between two checkpoints; 0: one at the end"""
    save_total_limit: PositiveInt | None = None
    """how many checkpoints to keep; unset: all"""
    load_best_model_at_end: bool = False
    """keep the checkpoint with the lowest loss of held-out rows too, and make the model of it"""
    resume: PathText = "auto"
    """"auto" goes on with the unfinished run of this name, "never" does not; or a run or checkpoint"""


class Log(Section):
    """What is told about the run."""

    logging_steps: PositiveInt = 1
    """steps between two reports"""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(default=(), strict=False)
    """trackers that get the numbers too, such as ["tensorboard"]; unset: none"""
    project: Text = "rptrain"
    """the project's name at wandb and trackio"""
    run_name: RunName | None = None
    """the run's folder; unset: named for the config file"""


class Config(Section):
    """Everything a run needs to know."""

    model: Model
    data: Data
    eval: Eval = Eval()
    train: Train = Train()
    lora: Lora | None = None
    optim: Optim = Optim()
    engine: Engine = Engine()
    save: Save = Save()
    log: Log = Log()

    @model_validator(mode="after")
    def _rounds(self) -> "Config":
        size = self.engine.round_size
        if size in (None, "auto") or self.train.micro_batch_size == "auto":
            return self
        if self.train.micro_batches % size:
            message = f"{size} does not divide the {self.train.micro_batches} micro-batches of a step"
            raise _mistake("engine.round_size", message)
        return self

    @model_validator(mode="after")
    def _validation(self) -> "Config":
        if self.data.val and self.data.val_size:
            raise _mistake("data.val_size", "there are [[data.val]] tables: remove it, or them")
        if not (self.data.val or self.data.val_size):
            for key in ("eval_steps", "early_stopping_patience"):
                if getattr(self.train, key):
                    raise _mistake(f"train.{key}", "there is nothing held out: set data.val_size, or add [[data.val]]")
        elif self.train.early_stopping_patience and not self.train.eval_steps:
            raise _mistake("train.early_stopping_patience", "set train.eval_steps, how often the loss is measured")
        if self.save.load_best_model_at_end:
            self._best()
        return self

    def _best(self) -> None:
        key, steps, every = "save.load_best_model_at_end", self.save.save_steps, self.train.eval_steps
        if not (self.data.val or self.data.val_size):
            raise _mistake(key, "there is nothing held out: set data.val_size, or add [[data.val]]")
        if not (steps and every) or steps % every:
            raise _mistake(
                key, "every checkpoint is to be measured: set save.save_steps to a multiple of train.eval_steps"
            )

    @model_validator(mode="after")
    def _moments(self) -> "Config":
        if self.model.dtype == "float64" and self.optim.moments != "fp32":
            message = f'"{self.optim.moments}" is not for models in float64: remove it, or set model.dtype'
            raise _mistake("optim.moments", message)
        return self

    @model_validator(mode="after")
    def _float16(self) -> "Config":
        if self.model.dtype == "float16":
            return self
        for key, given, default in (
            ("engine.fp16_accumulation", self.engine.fp16_accumulation, False),
            ("optim.loss_scale", self.optim.loss_scale, LOSS_SCALE),
            ("optim.loss_scale_steps", self.optim.loss_scale_steps, LOSS_SCALE_STEPS),
        ):
            if given != default:
                raise _mistake(key, 'this is for model.dtype = "float16": remove it, or set model.dtype')
        return self

    @model_validator(mode="after")
    def _hold(self) -> "Config":
        if self.model.hold == "memory":
            return self
        if self.adapters is None and not self.train.freeze:
            raise _mistake("model.hold", 'only weights that stay can be mapped: add a [lora] table, or use "memory"')
        if self.lora is not None and self.lora.base in ("nf4", "int8"):
            message = f'no file holds {self.lora.base}, so it cannot be mapped: use "bf16", or model.hold = "memory"'
            raise _mistake("lora.base", message)
        return self

    @model_validator(mode="after")
    def _method(self) -> "Config":
        if self.train.method == "full" and self.lora is not None and self.lora.base != "bf16":
            message = 'only weights that stay can be held in 4 or 8 bits: remove it, or train.method = "full"'
            raise _mistake("lora.base", message)
        if self.train.method == "full" and self.lora is not None:
            message = 'adapters are trained where there is a [lora] table: write "lora", or remove the table'
            raise _mistake("train.method", message)
        if self.lora is not None and not self.lora.target_modules and not self.lora.target_parameters:
            message = 'must be text, or a list such as ["q_proj", "v_proj"], where lora.target_parameters is not set'
            raise _mistake("lora.target_modules", message)
        if self.adapters is not None and self.train.freeze:
            message = "with adapters all weights stay as they are, but those of lora.modules_to_save: remove it"
            raise _mistake("train.freeze", message)
        return self

    @property
    def adapters(self) -> Lora | None:
        """Those that are trained; None where the weights themselves are."""
        return self.lora or (Lora() if self.train.method == "lora" else None)

    @property
    def round_size(self) -> int:
        """Micro-batches of a round, once "auto" is resolved."""
        assert self.engine.round_size != "auto"
        return self.engine.round_size or self.train.micro_batches

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.train.global_batch_size * self.data.max_length

    def step_sizes(self) -> dict[str, Any]:
        """What a step is made of, as the JSON of commands says it; of a config without "auto"."""
        return {
            "micro_batch_size": self.train.sequences,
            "length": self.data.max_length,
            "micro_batches": self.train.micro_batches,
            "round_size": self.round_size,
            "tokens": self.tokens,
            "update": self.optim.update,
        }

    @property
    def digest(self) -> str:
        """A short hash of all values, to tell configs apart."""
        return sha256(self.model_dump_json().encode()).hexdigest()[:16]


def keys() -> dict[str, FieldInfo]:
    """Every key of the config, dotted, in order; those of a [[data.train]] table as `data.train.path`."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in section.model_fields.items():
            inner = _section_of(field.annotation)
            if inner is None:
                yield prefix + name, field
            else:
                yield from walk(inner, f"{prefix}{name}.")

    return dict(walk(Config, ""))


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
