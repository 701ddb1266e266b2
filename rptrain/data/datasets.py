"""A config's training and validation sets, and the tokenizer that they are read with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rptrain.config.schema import Config, TrainSet
from rptrain.data.loader import RANDOM, Batches, load_tokenizer, prepare
from rptrain.data.sequences import Sequences
from rptrain.data.split import once, split
from rptrain.data.template import load_template
from rptrain.utils.errors import UserError


def find_tokenizer(config: Config, model_dir: Path) -> Any:
    """The model's tokenizer, with the config's chat template; None where the run needs none."""
    sources = (*config.data.train, *config.data.val)
    if all(source.path == RANDOM for source in sources) and not config.eval.questions:
        return None
    tokenizer = load_tokenizer(model_dir)
    if config.data.chat_template is not None:
        tokenizer.chat_template = load_template(tokenizer, config.data.chat_template)
    return tokenizer


def training_set(
    config: Config, model_dir: Path, vocab_size: int, tokenizer: Any
) -> tuple[Sequences, Sequences | None]:
    """The rows to train on, and those that data.val_size holds out. UserError for what is wrong with the data."""
    rows = _read(config, model_dir, vocab_size, tokenizer, config.data.train)
    return split(rows, config.data.val_size, config.train.seed) if config.data.val_size else (rows, None)


def validation_set(config: Config, model_dir: Path, vocab_size: int, tokenizer: Any) -> Sequences:
    """The rows of the sets under [[data.val]]. UserError for what is wrong with them."""
    return once(_read(config, model_dir, vocab_size, tokenizer, config.data.val))


def batches_of(rows: Sequences, config: Config) -> Batches:
    return Batches(rows, config.train.sequences, config.train.global_batch_size, config.train.seed)


def _read(config: Config, model_dir: Path, vocab_size: int, tokenizer: Any, sources: Sequence[TrainSet]) -> Sequences:
    data = config.data
    rows = prepare(
        sources=sources,
        tokenizer=tokenizer,
        max_length=data.max_length,
        packing=data.packing,
        assistant_only_loss=data.assistant_only_loss,
        chat_template=data.chat_template,
        overlong=data.overlong,
        cache_dir=data.cache_dir,
        vocab_size=vocab_size,
        seed=config.train.seed,
    )
    if rows.largest >= vocab_size:
        raise UserError(
            f"the tokenizer in {model_dir} gives token {rows.largest}, but config.json says vocab_size {vocab_size}: "
            "they are of different models"
        )
    return rows
