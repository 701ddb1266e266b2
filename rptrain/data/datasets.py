"""The training set, the validation set and the tokenizer of a config."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from rptrain.config.schema import Config, Data
from rptrain.data.eos import eos_ids
from rptrain.data.loader import RANDOM, Batches, load_tokenizer, prepare
from rptrain.data.sequences import NothingSupervised, Sequences
from rptrain.data.split import once, split
from rptrain.data.template import load_template
from rptrain.models.base_files import base_paths
from rptrain.models.locate import read_config
from rptrain.utils.errors import UserError
from rptrain.utils.file_state import FileState, states_of


def find_tokenizer(config: Config, model_dir: Path) -> Any:
    """The model's tokenizer with the config's chat template, and all EOS ids of the model as its `model_eos_ids`.

    None if the run needs no tokenizer.
    """
    sources = (*config.data.train, *config.data.val)
    if all(source.path == RANDOM for source in sources) and not (config.eval.questions or config.log.sample_prompts):
        return None
    given = config.data.chat_template
    states = states_of(base_paths(model_dir))
    return _tokenizer(model_dir, states, None if given is None else load_template(None, given))


@lru_cache(2)
def _tokenizer(model_dir: Path, states: tuple[FileState, ...], template: str | None) -> Any:
    """`states`: those of the model's files, which have changed if they differ."""
    tokenizer = load_tokenizer(model_dir)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.model_eos_ids = eos_ids(model_dir, read_config(model_dir / "config.json"), tokenizer)
    return tokenizer


def training_set(
    config: Config, model_dir: Path, vocab_size: int, tokenizer: Any
) -> tuple[Sequences, Sequences | None]:
    """The sequences to train on, and those held out by data.val_size. Raises UserError for mistakes in the data."""
    sequences = _read(config, config.data, model_dir, vocab_size, tokenizer)
    return split(sequences, config.data.val_size, config.train.seed) if config.data.val_size else (sequences, None)


def validation_set(config: Config, model_dir: Path, vocab_size: int, tokenizer: Any) -> Sequences:
    """The sequences of the sets under [[data.val]]. Raises UserError for mistakes in them."""
    try:
        data = config.data.model_copy(update={"train": config.data.val})
        return once(_read(config, data, model_dir, vocab_size, tokenizer))
    except NothingSupervised as error:
        raise UserError(f"the validation set in [[data.val]] cannot be used: {error}") from None


def batches_of(sequences: Sequences, config: Config) -> Batches:
    return Batches(sequences, config.train.sequences, config.train.global_batch_size, config.train.seed)


def _read(config: Config, data: Data, model_dir: Path, vocab_size: int, tokenizer: Any) -> Sequences:
    sequences = prepare(data, tokenizer, vocab_size=vocab_size, seed=config.train.seed)
    check_vocabulary(sequences.largest, vocab_size, model_dir)
    return sequences


def check_vocabulary(largest: int, vocab_size: int, model_dir: Path) -> None:
    """UserError if the largest token of the data is not in the model's vocabulary."""
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer in {model_dir} gives token {largest}, but config.json says vocab_size "
            f"{vocab_size}: they are of different models"
        )
