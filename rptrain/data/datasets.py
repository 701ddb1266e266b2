"""The training set, the validation set and the tokenizer of a config."""

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
    """The model's tokenizer with the config's chat template; None if the run needs none."""
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
    """The sequences to train on, and those held out by data.val_size. Raises UserError for mistakes in the data."""
    sequences = _read(config, model_dir, vocab_size, tokenizer, config.data.train)
    return split(sequences, config.data.val_size, config.train.seed) if config.data.val_size else (sequences, None)


def validation_set(config: Config, model_dir: Path, vocab_size: int, tokenizer: Any) -> Sequences:
    """The sequences of the sets under [[data.val]]. Raises UserError for mistakes in them."""
    return once(_read(config, model_dir, vocab_size, tokenizer, config.data.val))


def batches_of(sequences: Sequences, config: Config) -> Batches:
    return Batches(sequences, config.train.sequences, config.train.global_batch_size, config.train.seed)


def _read(config: Config, model_dir: Path, vocab_size: int, tokenizer: Any, sources: Sequence[TrainSet]) -> Sequences:
    data = config.data
    sequences = prepare(
        sources=sources,
        tokenizer=tokenizer,
        max_length=data.max_length,
        packing=data.packing,
        assistant_only_loss=data.assistant_only_loss,
        chat_template=data.chat_template,
        overlong=data.overlong,
        follow_links=data.follow_links,
        cache_dir=data.cache_dir,
        vocab_size=vocab_size,
        seed=config.train.seed,
    )
    if sequences.largest >= vocab_size:
        raise UserError(
            f"the tokenizer in {model_dir} gives token {sequences.largest}, but config.json says vocab_size "
            f"{vocab_size}: they are of different models"
        )
    return sequences
