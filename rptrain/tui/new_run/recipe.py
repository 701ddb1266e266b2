"""Settings to begin with for a model, a data set and a method: what a person would otherwise have to know."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Literal

from rptrain.planner.learning_rate import as_rate, suitable_rate

TINY, TASKS = "tiny-tasks", "builtin:tasks"
LONG = 2048  # tokens a row, of a chat

# Of the bundled example, whose rptrain.toml says what each is for.
EXAMPLE = {
    "model.dtype": "float32",
    "data.max_length": "26",
    "eval.questions": "500",
    "train.micro_batch_size": "4",
    "train.global_batch_size": "16",
    "train.num_epochs": "",
    "train.max_steps": "1500",
    "optim.learning_rate": "2e-3",
    "optim.warmup_steps": "200",
    "optim.weight_decay": "0.1",
    "optim.betas": "[0.9, 0.95]",
    "optim.moments": "",
    "save.save_steps": "500",
    "save.save_total_limit": "2",
    "log.logging_steps": "20",
}
TUNING = {
    "model.dtype": "bfloat16",
    "data.max_length": str(LONG),
    "eval.questions": "",
    "train.micro_batch_size": "1",
    "train.global_batch_size": "16",
    "train.num_epochs": "1.0",
    "train.max_steps": "",
    "optim.warmup_steps": "0.03",
    "optim.weight_decay": "",
    "optim.betas": "",
    "optim.moments": "",
    "save.save_steps": "200",
    "save.save_total_limit": "2",
    "log.logging_steps": "1",
}
ADAPTERS = {"lora.r": "16", "lora.lora_alpha": "32"}
USUAL = 8_000_000_000  # parameters of a model whose size is not known yet
RATE = "optim.learning_rate"


def recipe(model: str, data: str, method: str, parameters: int | None = None) -> Mapping[str, str]:
    """Values by key, as a person writes them; an empty one leaves the key out. `parameters`: of the model, if known."""
    values = dict(EXAMPLE if model == TINY else TUNING)
    if model != TINY or method == "lora":
        kind: Literal["full", "lora"] = "lora" if method == "lora" else "full"
        values[RATE] = as_rate(suitable_rate(parameters or USUAL, kind))
    if data == TASKS and model != TINY:
        values["data.max_length"] = "128"  # a question is short
    elif data != TASKS:
        values["eval.questions"] = ""
        if model == TINY:
            values["data.max_length"] = "256"
    if method == "lora":
        values |= ADAPTERS
    values["log.run_name"] = name_of(model, data)
    return values


def name_of(model: str, data: str) -> str:
    """The name of a run: the model's, and the data's if it is the user's own."""
    base = PurePath(model).name.lower() or "run"
    own = "" if data.startswith("builtin:") else PurePath(data).stem.lower()
    return "-".join(filter(None, (base, own))).lstrip(".").replace(" ", "-")
