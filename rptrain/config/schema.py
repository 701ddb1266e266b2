"""The configuration of a run: a strict, frozen tree; the line under a field is its documentation."""

from collections.abc import Iterator
from hashlib import sha256
from math import frexp
from typing import Any, Literal

from pydantic import (
    BaseModel,
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

from rptrain.config.columns import faults_of
from rptrain.config.relations import Found, Rules
from rptrain.config.sections import Section, section_of
from rptrain.config.types import MAX_COUNT, Beta, Columns, Count, Devices, Names, Number, PathText, RunName, Size, Text

LOSS_SCALE, LOSS_SCALE_STEPS = 65536.0, 2000
# Keys that can be "auto" until a run begins
AUTOMATIC = ("train.micro_batch_size", "engine.round_size", "engine.replicas")


RULES = Rules["Config"]()


class Model(Section):
    """The model to train."""

    path: PathText
    """a directory with a Hugging Face checkpoint, a model in the Hugging Face cache, or a bundled preset"""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """the data type of the weights"""
    init: Literal["auto", "random"] = "auto"
    """"auto": load the weights if there are any; "random": initialize new weights"""
    hold: Literal["memory", "map"] = "memory"
    """frozen weights: "memory" loads them, "map" reads them from disk whenever a GPU needs them"""
    follow_links: bool = False
    """copy tokenizer files to checkpoints and exports also if they are links that lead out of the model's folder"""


class TrainSet(Section):
    """A data set for training or validation. Write one table per set."""

    path: PathText
    """a file, a folder, a pattern such as "chats/*.jsonl", or built-in data: builtin:tasks, builtin:random"""
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca", "text"] = "auto"
    """the format of a row; "auto" detects it"""
    columns: Columns | None = None
    """columns with other names than the format's: {prompt = "question", completion = "answer"}; unset: data.columns"""
    split: Text = "train"
    """the split to use, if the data has splits"""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """training sets: uses per epoch; 0.5: half of the set, and the other half in the next epoch"""


class Data(Section):
    """The data, and how it becomes sequences of tokens."""

    train: tuple[TrainSet, ...] = Field(min_length=1, strict=False)
    """the data sets to train on"""
    val: tuple[TrainSet, ...] = Field(default=(), strict=False)
    """validation sets, as [[data.val]] tables; unset: sequences held out by val_size"""
    val_size: NonNegativeFloat = 0.0
    """sequences held out for validation; below 1: a fraction of them"""
    max_length: int = Field(2048, ge=2, le=MAX_COUNT)
    """the sequence length in tokens; memory and time grow with it"""
    overlong: Literal["truncate", "split", "drop", "error"] = "truncate"
    """longer samples: "truncate" them, "split" them, "drop" them, or stop with an "error" message"""
    max_bad_rows: NonNegativeFloat = 0.01
    """leave out up to N bad rows per data set; more stop the run; below 1: a fraction of the rows; 0: none"""
    packing: bool = True
    """put several samples into one sequence; they do not see each other"""
    assistant_only_loss: bool = True
    """compute the loss only on assistant replies"""
    columns: Columns | None = None
    """columns with other names than the format's, of sets without their own; unset: rows have the format's names"""
    chat_template: Text | None = None
    """a Jinja file or text, or alpaca, chatml, gemma, llama3, mistral or vicuna; unset: the tokenizer's own"""
    reasoning: Literal["refuse", "drop", "inline"] = "refuse"
    """thoughts that the template leaves out: "refuse" the row, "drop" them, or write them "inline" in the content"""
    follow_links: bool = False
    """follow links in a data folder that lead out of it"""
    cache_dir: PathText | None = None
    """the folder of tokenized data; unset: ~/.cache/rptrain"""

    @field_validator("max_bad_rows")
    @classmethod
    def _rows(cls, limit: float) -> float:
        if limit > 1 and limit % 1:
            raise PydanticCustomError("value", "{text}", {"text": "must be a whole number of rows, or below 1"})
        return limit


class Eval(Section):
    """Questions that are asked before and after training."""

    questions: int = Field(default=0, ge=0, le=100_000)
    """number of questions of the built-in tasks to ask; 0: none"""


class Train(Section):
    """Method, batch sizes and length of training."""

    method: Literal["full", "lora"] | None = None
    """"full": train the weights; "lora": train adapters; unset: "lora" if there is a [lora] table"""
    freeze: tuple[Text, ...] = Field(default=(), strict=False)
    """tensors that are not trained, such as "model.layers.0.*" ("*" matches any text); unset: none"""
    micro_batch_size: Count | Literal["auto"] = 1
    """sequences computed together on a GPU; "auto": the fastest according to the plan"""
    global_batch_size: Count = 16
    """sequences per step; a multiple of micro_batch_size"""
    num_epochs: float = Field(default=1.0, gt=0, le=10**6)
    """passes over the training data"""
    max_steps: Count | None = None
    """overrides num_epochs; unset: use num_epochs"""
    eval_steps: NonNegativeInt = 0
    """evaluate every N steps; 0: only at the end"""
    eval_on_start: bool = False
    """also evaluate before the first step, as step 0; the loss then does not count for early stopping"""
    early_stopping_patience: PositiveInt | None = None
    """stop after N evaluations without improvement; unset: never"""
    seed: NonNegativeInt = 0
    """seed for data order and new weights"""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """weight of the loss that balances experts; unset: the model's, if it has output_router_logits"""

    @property
    def sequences(self) -> int:
        """Sequences per micro-batch, once "auto" is resolved."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, once "auto" is resolved."""
        return self.global_batch_size // self.sequences


class Lora(Section):
    """Low-rank adapters, with PEFT's names; all other weights are frozen."""

    r: Count = 8
    """the rank of the adapters; more learns more and takes more memory"""
    lora_alpha: Number = Field(default=8, le=MAX_COUNT)
    """the output of an adapter is multiplied by lora_alpha / r"""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout on an adapter's input"""
    target_modules: Names = "all-linear"
    """"all-linear", a list such as ["q_proj", "v_proj"], or a regular expression for whole names"""
    use_rslora: bool = False
    """multiply by lora_alpha / sqrt(r) instead"""
    use_dora: bool = False
    """DoRA: also train the length of each row of an adapted weight; needs lora_dropout = 0"""
    modules_to_save: tuple[Text, ...] = Field(default=(), strict=False)
    """modules trained as a whole, such as ["embed_tokens"]; with untied embeddings "lm_head" too"""
    base: Literal["bf16", "nf4", "mxfp4", "int8", "fp8"] = "bf16"
    """the frozen matrices: "bf16" keeps model.dtype; the others quantize them; choose "fp8" for engine.fp8"""
    target_parameters: tuple[Text, ...] = Field(default=(), strict=False)
    """models with experts: MLP parameters with adapters, such as "mlp.experts.down_proj"; unset: none"""
    adapter: PathText | None = None
    """the folder of an adapter to continue training, with the same settings; unset: a new one"""


class Optim(Section):
    """AdamW and its learning rate."""

    learning_rate: PositiveFloat = 1e-5
    """peak learning rate"""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    """schedule after warm-up"""
    warmup_steps: NonNegativeFloat = 0.0
    """steps in which the learning rate rises; below 1: a fraction of all steps"""
    weight_decay: NonNegativeFloat = 0.0
    """weight decay on matrices, not on norms"""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), strict=False)
    """AdamW betas: decay rates of the averages of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon"""
    max_grad_norm: NonNegativeFloat = 1.0
    """clip the gradient norm to this; 0: off"""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """optimizer state: 8 ("fp32"), 4 ("bf16") or 2.06 ("int8") bytes per parameter of host memory"""
    loss_scale: float = LOSS_SCALE
    """with float16: the initial loss scale, a power of two; halved when a gradient overflows"""
    loss_scale_steps: PositiveInt = LOSS_SCALE_STEPS
    """with float16: the loss scale doubles after N steps without overflow"""
    max_skipped_steps: PositiveInt = 20
    """end the run after N steps in a row whose gradients are not finite"""
    update: Literal["async", "sync"] = "async"
    """"async": gradients use weights one step old; GPUs never wait for the optimizer; "sync": exact"""

    @field_validator("loss_scale")
    @classmethod
    def _power_of_two(cls, scale: float) -> float:
        if scale < 1 or frexp(scale)[0] != 0.5:
            raise PydanticCustomError("value", "{text}", {"text": "must be a power of two, 1 or more"})
        return scale


class Engine(Section):
    """Devices, memory limits and how the pipeline runs."""

    devices: Devices = "auto"
    """GPUs of one model: "auto", "cuda" (all), "cuda:0,1", "cuda:GPU-8a1b" (UUID or its beginning); "cpu:N": workers"""
    vram_limit: Size | None = None
    """memory limit per GPU, such as "24GiB"; unset: all free memory"""
    host_limit: Size | None = None
    """host memory limit of the process, such as "200GiB"; unset: all free memory"""
    round_size: Count | Literal["auto"] | None = None
    """micro-batches per round; fewer need less host memory; "auto": the fastest; unset: all that a replica has"""
    replicas: Count | Literal["auto"] = 1
    """groups of GPUs that share a step; "auto": the fastest; speeds up small models, costs host memory"""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """type of gradients between processes; "bfloat16": half the bytes, but the number of processes changes the bits"""
    optimizer_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of the optimizer; unset: four fifths of the cores of each NUMA node, at most 32 per node"""
    fp16_accumulation: bool = False
    """with float16: GPUs sum products in float16, on GeForce cards also in attention; faster there, less exact"""
    fp8: bool = False
    """with bfloat16 or float32: multiply blocks in FP8; attention in float16 on GeForce; RTX 40, L40S, H100 or newer"""
    replan: bool = True
    """measure layers in early steps, plan again with their times, and keep the faster plan; not in short runs"""
    stall_timeout: float = Field(default=600.0, ge=0, le=10**9)
    """seconds without progress until a report of what every thread waits for is written; 0: never"""
    stall_action: Literal["stop", "report"] = "stop"
    """after that report, "stop" ends the process with status 1; "report" waits on"""
    trace: bool = False
    """record when each stage ran on each device"""


class Save(Section):
    """Where runs are saved, and when."""

    output_dir: PathText = "runs"
    """the folder in which each run gets a folder"""
    save_steps: NonNegativeInt = 0
    """save a checkpoint every N steps; 0: only at the end"""
    save_total_limit: PositiveInt | None = None
    """keep the newest N checkpoints; unset: all"""
    load_best_model_at_end: bool = False
    """also keep the checkpoint with the lowest validation loss; it is the result of the run"""
    stop_timeout: float = Field(default=30.0, ge=0, le=10**9)
    """seconds after a signal by which a running step must end and be saved; a longer step is dropped"""
    resume: PathText = "auto"
    """"auto" resumes the unfinished run of this name; "never"; or the path of a run or checkpoint"""


class Log(Section):
    """What is reported about a run, and where."""

    logging_steps: PositiveInt = 1
    """log every N steps"""
    sample_prompts: tuple[Text, ...] = Field(default=(), max_length=4, strict=False)
    """up to 4 prompts that are answered at each evaluation, in up to 64 tokens, on the CPU; unset: none"""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(default=(), strict=False)
    """trackers that receive the figures, such as ["tensorboard"]; unset: none"""
    project: Text = "rptrain"
    """the project name at wandb and trackio"""
    run_name: RunName | None = None
    """the name of the run and of its folder; unset: named after the config file"""


class Config(Section):
    """All settings of a run."""

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
    def _relations(self) -> "Config":
        if found := RULES.broken(self):
            raise PydanticCustomError("conflicts", "values that cannot be used together", {"conflicts": found})
        return self

    @property
    def adapters(self) -> Lora | None:
        """The adapters to train; None if the weights themselves are trained."""
        return self.lora or (Lora() if self.train.method == "lora" else None)

    @property
    def round_size(self) -> int:
        """Micro-batches of a round, once "auto" is resolved."""
        assert self.engine.round_size != "auto"
        return self.engine.round_size or self.train.micro_batches // self.replicas

    @property
    def replicas(self) -> int:
        """Groups of devices, once "auto" is resolved."""
        assert self.engine.replicas != "auto"
        return self.engine.replicas

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.train.global_batch_size * self.data.max_length

    def step_sizes(self) -> dict[str, Any]:
        """The sizes of a step for the JSON of commands; needs a config without "auto"."""
        return {
            "micro_batch_size": self.train.sequences,
            "length": self.data.max_length,
            "micro_batches": self.train.micro_batches,
            "round_size": self.round_size,
            "replicas": self.replicas,
            "tokens": self.tokens,
            "update": self.optim.update,
        }

    @property
    def digest(self) -> str:
        """A short hash of all values, to tell configs apart."""
        return sha256(self.model_dump_json().encode()).hexdigest()[:16]


_VALIDATION = ("data.val", "data.val_size")
_NO_VALIDATION = "needs a validation set: set data.val_size, or add [[data.val]]"


def _divides(config: Config) -> bool:
    sequences, part = config.train.global_batch_size, config.train.micro_batch_size
    return part != "auto" and sequences % part == 0


@RULES.about("train.global_batch_size", "train.micro_batch_size")
def _batch(config: Config) -> Found:
    sequences, part = config.train.global_batch_size, config.train.micro_batch_size
    if part != "auto" and sequences % part:
        yield "train.global_batch_size", f"{sequences} is not a multiple of train.micro_batch_size, {part}"


@RULES.about("optim.warmup_steps", "optim.lr_scheduler_type")
def _warmup(config: Config) -> Found:
    steps = config.optim.warmup_steps
    if steps > 1 and steps % 1:
        yield "optim.warmup_steps", f"{steps} is neither a whole number of steps nor a fraction below 1"
    elif steps and config.optim.lr_scheduler_type == "constant":
        yield (
            "optim.lr_scheduler_type",
            '"constant" has no warm-up: write "constant_with_warmup", or optim.warmup_steps = 0',
        )


@RULES.about("engine.round_size", "train.global_batch_size", "train.micro_batch_size")
def _rounds(config: Config) -> Found:
    size = config.engine.round_size
    if size not in (None, "auto") and _divides(config) and config.train.micro_batches % size:
        yield "engine.round_size", f"{size} does not divide the {config.train.micro_batches} micro-batches of a step"


@RULES.about("engine.replicas", "engine.round_size", "train.global_batch_size", "train.micro_batch_size")
def _replicas(config: Config) -> Found:
    replicas, size = config.engine.replicas, config.engine.round_size
    if replicas == "auto" or size == "auto" or not _divides(config):
        return
    count = config.train.micro_batches
    if size is None and count % replicas:
        yield "engine.replicas", f"{replicas} does not divide the {count} micro-batches of a step"
    if size is not None and count % size == 0 and count % (replicas * size):
        yield (
            "engine.replicas",
            f"{replicas} does not divide the rounds of a step: {count // size}, by engine.round_size",
        )


@RULES.about(*_VALIDATION)
def _one_validation(config: Config) -> Found:
    if config.data.val and config.data.val_size:
        yield "data.val_size", "cannot be used with [[data.val]] tables: remove one of them"


_EVALUATED = ("train.eval_steps", "train.eval_on_start", "train.early_stopping_patience", "log.sample_prompts")


@RULES.about(*_VALIDATION, *_EVALUATED)
def _evaluated(config: Config) -> Found:
    train = config.train
    if not (config.data.val or config.data.val_size):
        for key in _EVALUATED:
            section, _, name = key.partition(".")
            if getattr(getattr(config, section), name):
                yield key, _NO_VALIDATION
    elif train.early_stopping_patience and not train.eval_steps:
        yield "train.early_stopping_patience", "needs train.eval_steps: set how often to evaluate"


@RULES.about(*_VALIDATION, "save.load_best_model_at_end", "save.save_steps", "train.eval_steps")
def _best(config: Config) -> Found:
    key, steps, every = "save.load_best_model_at_end", config.save.save_steps, config.train.eval_steps
    if not config.save.load_best_model_at_end:
        return
    if not (config.data.val or config.data.val_size):
        yield key, _NO_VALIDATION
    elif not (steps and every) or steps % every:
        yield key, "every checkpoint must be evaluated: set save.save_steps to a multiple of train.eval_steps"


@RULES.about("model.dtype", "optim.moments", "engine.reduce_dtype")
def _float64(config: Config) -> Found:
    if config.model.dtype == "float64":
        for key, given, only in (
            ("optim.moments", config.optim.moments, "fp32"),
            ("engine.reduce_dtype", config.engine.reduce_dtype, "float32"),
        ):
            if given != only:
                yield key, f'"{given}" is not for models in float64: remove it, or set model.dtype'


@RULES.about("model.dtype", "engine.fp16_accumulation", "optim.loss_scale", "optim.loss_scale_steps")
def _float16(config: Config) -> Found:
    if config.model.dtype != "float16":
        for key, given, default in (
            ("engine.fp16_accumulation", config.engine.fp16_accumulation, False),
            ("optim.loss_scale", config.optim.loss_scale, LOSS_SCALE),
            ("optim.loss_scale_steps", config.optim.loss_scale_steps, LOSS_SCALE_STEPS),
        ):
            if given != default:
                yield key, 'is only for model.dtype = "float16": remove it, or set model.dtype'


@RULES.about("model.dtype", "engine.fp8")
def _fp8(config: Config) -> Found:
    if config.engine.fp8 and config.model.dtype not in ("bfloat16", "float32"):
        yield "engine.fp8", f'is for models in bfloat16 or float32, and model.dtype is "{config.model.dtype}"'


@RULES.about("model.hold", "train.method", "train.freeze", "lora.base")
def _hold(config: Config) -> Found:
    if config.model.hold == "memory":
        return
    if config.adapters is None and not config.train.freeze:
        yield "model.hold", '"map" needs frozen weights: add a [lora] table, or use "memory"'
    if config.lora is not None and config.lora.base in ("nf4", "int8", "fp8"):
        yield (
            "lora.base",
            f'files do not hold {config.lora.base}, so model.hold = "map" cannot read it: use "bf16" or "memory"',
        )


@RULES.about("train.method", "lora.base")
def _method(config: Config) -> Found:
    if config.train.method == "full" and config.lora is not None:
        if config.lora.base != "bf16":
            yield "lora.base", 'only frozen weights can be quantized: remove it, or remove train.method = "full"'
        else:
            yield "train.method", 'a [lora] table trains adapters: write "lora", or remove the table'


@RULES.about("lora.target_modules", "lora.target_parameters")
def _targets(config: Config) -> Found:
    if config.lora is not None and not config.lora.target_modules and not config.lora.target_parameters:
        yield (
            "lora.target_modules",
            'must be text, or a list such as ["q_proj", "v_proj"], unless lora.target_parameters is set',
        )


@RULES.about("data.columns", "data.train", "data.val")
def _columns(config: Config) -> Found:
    for name, sets in (("data.train", config.data.train), ("data.val", config.data.val)):
        for number, fault in faults_of([(source.format, source.columns) for source in sets], config.data.columns):
            yield f"{name}.{number}.columns", fault


@RULES.about("train.method", "train.freeze")
def _frozen(config: Config) -> Found:
    if config.adapters is not None and config.train.freeze:
        yield "train.freeze", "with adapters all weights are frozen except lora.modules_to_save: remove this key"


def keys() -> dict[str, FieldInfo]:
    """Every key of the config, dotted, in order; those of a [[data.train]] table as `data.train.path`."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in section.model_fields.items():
            inner = section_of(field.annotation)
            if inner is None:
                yield prefix + name, field
            else:
                yield from walk(inner, f"{prefix}{name}.")

    return dict(walk(Config, ""))
