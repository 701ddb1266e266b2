"""Data sources to rows, and the batch that each step takes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rptrain.data import formats, tasks
from rptrain.data.batch import IGNORED, Batch
from rptrain.data.packing import Documents
from rptrain.data.rows import Rows, build, shuffled
from rptrain.data.template import encode
from rptrain.errors import UserError

TASKS, RANDOM = "builtin:tasks", "builtin:random"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
RANDOM_ROWS = 256  # of the built-in set of random tokens


class SourceLike(Protocol):
    """A file, or a built-in set; `split` ("train" or "test") is of the built-in tasks only."""

    @property
    def path(self) -> str: ...

    @property
    def format(self) -> str: ...

    @property
    def split(self) -> str: ...


@dataclass(frozen=True)
class Source:
    path: str
    format: str = "auto"
    split: str = "train"


class Batches:
    """The batch of every step, by arithmetic on the step alone: there is no state to store.

    Each epoch takes every row once, in an order that follows from `seed` and the epoch; a short last batch is
    filled with padding rows, whose labels are ignored.
    """

    def __init__(self, rows: Rows, micro_batch_size: int, global_batch_size: int, seed: int):
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
            raise UserError(
                f"train.global_batch_size ({global_batch_size}) must be a multiple of "
                f"train.micro_batch_size ({micro_batch_size})"
            )
        self.rows, self.seed = rows, seed
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.global_batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """The rows of an epoch in the order in which they are taken."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self.rows), self.seed, epoch)
        return self._order

    def taken(self, step: int) -> np.ndarray:
        """The rows of a step, which counts from 0 over all epochs; fewer than global_batch_size in a short batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.order(epoch)[place * self.global_batch_size : (place + 1) * self.global_batch_size]

    def batch(self, step: int) -> Batch:
        """The batch of a step, which counts from 0 over all epochs."""
        size, length = self.global_batch_size, self.rows.length
        chosen = self.taken(step)
        index = torch.from_numpy(chosen)
        input_ids = torch.full((size, length), self.rows.pad_id, dtype=torch.int64)
        labels = torch.full((size, length), IGNORED, dtype=torch.int64)
        input_ids[: len(chosen)] = self.rows.input_ids[index].long()
        labels[: len(chosen)] = self.rows.labels[index].long()
        by_row = [self.rows.documents(row) for row in chosen.tolist()] + [[length]] * (size - len(chosen))
        documents = tuple(
            tuple(document for row in by_row[start : start + self.micro_batch_size] for document in row)
            for start in range(0, size, self.micro_batch_size)
        )
        shape = (size // self.micro_batch_size, self.micro_batch_size * length)
        return Batch(
            input_ids=input_ids.view(shape),
            positions=torch.cat([torch.arange(document) for row in by_row for document in row]).view(shape),
            labels=labels.view(shape),
            documents=documents,
            rows=self.micro_batch_size,
            length=length,
            supervised=int(self.rows.supervised[index].sum()),
            seed=self.seed,
            step=step,
        )


def prepare(
    *,
    sources: Sequence[SourceLike],
    tokenizer: Any = None,
    max_length: int,
    packing: bool = True,
    assistant_only_loss: bool = True,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
) -> Rows:
    """Reads, renders, tokenises and packs the sources, in this order.

    `tokenizer` may be None, and `vocab_size` must be given, for random tokens only. `seed` decides which
    documents of a length share a row. UserError: see `read` and `encode`; or no token is supervised.
    """
    if not sources:
        raise UserError("there is no data: add a [[data.train]] entry with a path")
    if max_length < 2:
        raise UserError(f"data.max_length is {max_length}: a row has at least 2 tokens")
    documents = Documents(max_length)
    for source in sources:
        if source.path == RANDOM:
            _add_random(documents, vocab_size)
        elif tokenizer is None:
            raise UserError(f"{source.path}: needs the model's tokenizer")
        else:
            encode(
                _examples(source),
                tokenizer,
                documents,
                assistant_only_loss=assistant_only_loss,
                chat_template=chat_template,
            )
    documents.warn()
    return build(documents, packing=packing, pad_id=_pad_id(tokenizer), seed=seed)


def load_tokenizer(directory: str | Path) -> Any:
    """The tokenizer of a model directory, from its files alone. UserError: none, or not a fast one."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such model directory")
    if not any((directory / name).is_file() for name in VOCABULARIES):  # transformers would make up an empty one
        raise UserError(f"{directory}: there is no tokenizer; bring the model's tokenizer.json there")
    damaged = (OSError, ValueError, TypeError, LookupError, AttributeError, StrictDataclassError)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except damaged as error:
        raise UserError(f"{directory}: no tokenizer that transformers can load: {error}") from error
    if not tokenizer.is_fast:
        raise UserError(f"{directory}: the tokenizer has no tokenizer.json, which gives the tokens' places")
    return tokenizer


def _examples(source: SourceLike) -> list[formats.Example]:
    if source.path == TASKS:
        if source.split == "train":
            asked = tasks.questions("train", tasks.TRAIN_QUESTIONS)
        elif source.split == "test":
            asked = tasks.questions("test", tasks.TEST_QUESTIONS)
        else:
            raise UserError(f'{TASKS}: the splits are "train" and "test", not {source.split!r}')
        return [formats.Example(TASKS, line, messages=one.messages) for line, one in enumerate(asked, 1)]
    if source.path.startswith("builtin:"):
        raise UserError(f"{source.path}: the built-in sets are {TASKS} and {RANDOM}")
    if source.split != "train":
        raise UserError(f"{source.path}: a file has no split {source.split!r}; it is taken whole")
    return formats.read(source.path, source.format)


def _add_random(documents: Documents, vocab_size: int | None) -> None:
    if vocab_size is None:
        raise UserError(f"{RANDOM}: needs the vocabulary's size")
    generator = torch.Generator().manual_seed(0)
    for _ in range(RANDOM_ROWS):
        ids = torch.randint(vocab_size, (documents.max_length,), generator=generator).tolist()
        documents.add(ids, [True] * len(ids))


def _pad_id(tokenizer: Any) -> int:
    """Padding is never supervised and in documents of its own, so any token will do."""
    pad = None if tokenizer is None else tokenizer.pad_token_id
    return 0 if pad is None else pad
