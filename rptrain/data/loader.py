"""Loading of data sources as sequences, and the batch of each step."""

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from os.path import getsize, isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rptrain.config.schema import Data, TrainSet
from rptrain.data import cache, formats, notes, tasks
from rptrain.data.folders import Chosen, choose, named
from rptrain.data.formats import Tally
from rptrain.data.pieces import piece
from rptrain.data.probe import Probe
from rptrain.data.progress import Watch
from rptrain.data.row_format import RowFormat
from rptrain.data.sequences import Group, Sequences, build, shuffled
from rptrain.data.template import EncodeOptions, encode, load_template, template_for_tools
from rptrain.data.tokens import Document, Origin, Stream, gather, tokenized
from rptrain.kernels.batch import IGNORED, Batch
from rptrain.models.base_files import check_base_files
from rptrain.utils.errors import UserError, describe
from rptrain.utils.phases import Phase, during, phase
from rptrain.utils.text import counted

log = logging.getLogger(__name__)

TASKS, RANDOM = "builtin:tasks", "builtin:random"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
LARGE = 1 << 30  # bytes of a file that takes more than a second to hash
RANDOM_ROWS = 256  # sequences in the built-in set of random tokens


class Batches:
    """The batch of every step, computed from the number of the step alone: there is no state to store.

    Each epoch draws every sequence as often as its weight says, in an order that depends on `seed` and the epoch. Its
    last batch can be short: it has fewer micro-batches, and the last of them is filled with padding, whose labels are
    ignored.
    """

    def __init__(self, sequences: Sequences, micro_batch_size: int, global_batch_size: int, seed: int):
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
            raise UserError(
                f"train.global_batch_size ({global_batch_size}) must be a multiple of "
                f"train.micro_batch_size ({micro_batch_size})"
            )
        self.sequences, self.seed = sequences, seed
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.per_epoch // self.global_batch_size)

    @property
    def per_epoch(self) -> int:
        """The sequences of an epoch."""
        return sum(map(drawn, self.sequences.groups))

    def order(self, epoch: int) -> np.ndarray:
        """The sequences of an epoch in training order."""
        if epoch != self._epoch:
            taken = np.concatenate([self._taken(number, epoch) for number in range(len(self.sequences.groups))])
            self._epoch, self._order = epoch, taken[shuffled(len(taken), self.seed, epoch)]
        return self._order

    def _taken(self, number: int, epoch: int) -> np.ndarray:
        """The sequences of a group in an epoch, continuing where the previous epoch ended.

        All sequences of a group are used before one is used again, whatever its weight.
        """
        group = self.sequences.groups[number]
        begin = epoch * drawn(group)
        end = begin + drawn(group)
        parts = []
        for turn in range(begin // group.count, -(-end // group.count)):
            first, last = max(begin - turn * group.count, 0), min(end - turn * group.count, group.count)
            if last - first == group.count:
                parts.append(group.first + np.arange(group.count))
            else:
                parts.append(group.first + shuffled(group.count, self.seed, turn, 1 + number)[first:last])
        return np.concatenate(parts)

    def taken(self, step: int) -> np.ndarray:
        """The sequences of a step, fewer than global_batch_size in a short batch. Steps count over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.order(epoch)[place * self.global_batch_size : (place + 1) * self.global_batch_size]

    def batch(self, step: int) -> Batch:
        """The batch of a step. Steps count from 0 over all epochs."""
        chosen, length = self.taken(step), self.sequences.length
        size = -(-len(chosen) // self.micro_batch_size) * self.micro_batch_size
        input_ids = torch.full((size, length), self.sequences.pad_id, dtype=torch.int64)
        labels = torch.full((size, length), IGNORED, dtype=torch.int64)
        input_ids[: len(chosen)], labels[: len(chosen)] = self.sequences.take(chosen.tolist())
        lengths = [self.sequences.documents(index) for index in chosen.tolist()] + [[length]] * (size - len(chosen))
        documents = tuple(
            tuple(document for sequence in lengths[start : start + self.micro_batch_size] for document in sequence)
            for start in range(0, size, self.micro_batch_size)
        )
        shape = (size // self.micro_batch_size, self.micro_batch_size * length)
        return Batch(
            input_ids=input_ids.view(shape),
            positions=torch.cat([torch.arange(document) for sequence in lengths for document in sequence]).view(shape),
            labels=labels.view(shape),
            documents=documents,
            sequences=self.micro_batch_size,
            length=length,
            supervised=int(self.sequences.supervised[chosen].sum()),
            seed=self.seed,
            step=step,
            full=self.global_batch_size // self.micro_batch_size,
        )


def drawn(group: Group) -> int:
    """The number of sequences that an epoch draws from a group."""
    return max(1, round(group.weight * group.count))


def prepare(data: Data, tokenizer: Any = None, *, vocab_size: int | None = None, seed: int = 0) -> Sequences:
    """Reads, renders, tokenizes and packs the training sets of [data] in their order. Tokens are cached.

    For random tokens only, `tokenizer` may be None, but `vocab_size` must be given. `seed` decides which documents of
    equal length share a sequence. Raises UserError as `choose`, `read` and `encode` do, or if no token is supervised.
    """
    folder = Path(data.cache_dir) if data.cache_dir else cache.default_folder()
    settings = None if tokenizer is None else Tokenizing(tokenizer, EncodeOptions.of(data, tokenizer), folder)
    streams: list[Stream] = []
    weights: list[float] = []
    others: list[tuple[TrainSet, Chosen]] = []
    for source in data.train:
        if source.path == RANDOM:
            found = [_random_stream(data.max_length, vocab_size)]
        elif settings is None:
            raise UserError(f"{source.path}: needs the model's tokenizer")
        elif source.path.startswith("builtin:"):
            found = [settings.builtin(questions_of(source), data.max_bad_rows)]
        else:
            chosen = choose(source.path, source.split, follow_links=data.follow_links)
            others.append((source, chosen))
            found = settings.streams(chosen.files, RowFormat.of(source, data), data.max_bad_rows)
        streams += found
        weights += [source.weight] * len(found)
    with phase("packing sequences"):
        pieces = piece(streams, data.max_length, data.overlong)
        pieces.trimmed.warn()
        pad_id = _pad_id(tokenizer, vocab_size)
        rows = build(streams, pieces, packing=data.packing, pad_id=pad_id, seed=seed, weights=weights)
    read = settings.rows if settings is not None else Tally()
    for sentence in notes.sentences(read.notes):
        log.warning(sentence)
    return replace(rows, not_taken=_not_taken(others), rows=read)


class Tokenizing:
    """The settings of tokenization and the folder of the cache. `rows` counts those of all sets, and a file that is in
    several of them with the same format once.
    """

    def __init__(self, tokenizer: Any, options: EncodeOptions, folder: Path) -> None:
        self._tokenizer, self._options, self._folder = tokenizer, options, folder
        self.rows, self._counted = Tally(), set[tuple[str, RowFormat]]()
        given = options.chat_template
        template = load_template(tokenizer, given) if given or tokenizer.chat_template else None
        self._template = template
        self._settings = [
            cache.code_hash(),
            cache.tokenizer_hash(tokenizer),
            bool(tokenizer.split_special_tokens),
            template,
            template_for_tools(tokenizer, given),
            options.assistant_only_loss,
            options.reasoning,
            sorted(options.eos_ids),
        ]

    def builtin(self, questions: list[formats.Example], max_bad_rows: float) -> Stream:
        tally = Tally(len(questions))
        stream = gather(self.documents(questions, tally), TASKS)
        Tally.joined({TASKS: tally}).judge(max_bad_rows)
        self.rows = replace(self.rows, notes=self.rows.notes + tally.notes, ends=self.rows.ends + tally.ends)
        return stream

    def documents(self, examples: Iterable[formats.Example], tally: Tally) -> Generator[Document, None, None]:
        return encode(examples, self._tokenizer, self._options, tally=tally)

    def streams(self, files: Sequence[Path], format: RowFormat, max_bad_rows: float) -> list[Stream]:
        """The tokens of a source's files. Raises UserError if more of all rows are bad than `max_bad_rows` allows."""
        streams: list[Stream] = []
        tallies: dict[str, Tally] = {}
        cache.allow_open(len(files))
        shown = Phase("reading data", unit="")
        watch = Watch(files, lambda progress: progress.show(shown))
        with during(shown):
            self._read(files, format, watch, streams, tallies)
        tally = Tally.joined(tallies)
        tally.judge(max_bad_rows)
        counted = {file: tally for file, tally in tallies.items() if (file, format) not in self._counted}
        self._counted |= {(file, format) for file in counted}
        self.rows += Tally.joined(counted)
        return streams

    def _read(
        self, files: Sequence[Path], format: RowFormat, watch: Watch, streams: list[Stream], tallies: dict[str, Tally]
    ) -> None:
        """Adds the tokens and the counts of each file, from the cache if they are there."""
        for number, file in enumerate(files):
            if isfile(file) and getsize(file) > LARGE:
                next(formats.read(file, format), None)  # hashing takes long: report mistakes at the beginning before
            key = self._key(file, format)
            with phase(f"reading the tokens of {file.name}", unit=""):
                found = cache.load(self._folder, key)
            if found is None:
                log.info("tokenizing %s", file)
                tally = Tally()
                watch.begin(number, tally)
                examples = watch.examples(formats.read(file, format, tally))
                with closing(self.documents(examples, tally)) as documents:  # which ends its processes
                    whole = self._of_whole(file, key, format, watch.documents(documents))
                    found = cache.store(self._folder, key, whole, tally), tally
            streams.append(replace(found[0], name=str(file), origin=self._origin(file, format, found[1])))
            tallies[str(file)] = found[1]

    def cached(self, file: Path, format: RowFormat) -> tuple[Stream, Tally] | None:
        """The tokens of a file that was tokenized before; None if it was not. Reads the file, for its hash."""
        found = cache.load(self._folder, self._key(file, format))
        return found and (replace(found[0], name=str(file)), found[1])

    def _origin(self, file: Path, format: RowFormat, tally: Tally) -> Origin:
        made = (self._tokenizer, self._template, self._options.assistant_only_loss)
        return Origin(file, format.name, *made, tally, self._folder)

    def _key(self, file: Path, format: RowFormat) -> str:
        with phase(f"hashing {file.name}", _size(file), reads=True):
            return cache.content_key(file, [format.key, *self._settings])

    def _of_whole(self, file: Path, key: str, format: RowFormat, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents of a file. Raises UserError at the end, before they are cached, if the file was changed."""
        yield from documents
        if self._key(file, format) != key:
            raise UserError(f"{file} was changed while it was read: start again when no program writes it")


@phase("loading the tokenizer", unit="")
def load_tokenizer(directory: str | Path) -> Any:
    """The tokenizer in a model directory. Raises UserError if there is none, if it is not a fast tokenizer, or if
    transformers refuses the config.json.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such model directory")
    check_base_files(directory)  # transformers reads them whole
    if not any((directory / name).is_file() for name in VOCABULARIES):  # transformers would create an empty one
        raise UserError(f"{directory}: there is no tokenizer; copy the model's tokenizer.json there")
    probe = Probe(directory)

    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer  # takes long: the trial runs meanwhile

    probe.wait()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        tokenized(tokenizer, "?")  # settings of a wrong type raise when they are used
    except UserError:
        raise
    except StrictDataclassError as error:  # a value of config.json, which transformers reads, too
        reason = describe(error.__cause__ or error)
        raise UserError(
            f"{directory / 'config.json'}: transformers refuses it: {reason}: correct this value, or remove its key"
        ) from error
    except Exception as error:
        deep = "its files are nested too deeply" if isinstance(error, RecursionError) else describe(error)
        raise UserError(f"{directory}: transformers cannot load the tokenizer: {deep}") from error
    if not tokenizer.is_fast:
        raise UserError(
            f"{directory}: the tokenizer has no tokenizer.json, which is needed to find "
            "the positions of tokens in the text"
        )
    return tokenizer


def _size(file: Path) -> int | None:
    """The bytes of a file; None if they are unknown: its reader raises why."""
    return getsize(file) if isfile(file) else None


def _not_taken(sources: Sequence[tuple[TrainSet, Chosen]]) -> tuple[str, ...]:
    """The ignored files in each source that is a folder. Warns about files that belong to no split."""
    taken = {file for _, chosen in sources for file in chosen.files}
    lines = {}
    for source, chosen in sources:
        names = {file: why for file, why in chosen.others.items() if file not in taken}
        if names:
            line = f"{source.path}: {counted(len(names), 'file')} ignored: {named(names, source.path)}"
            if chosen.lost:
                log.warning(line)
            lines[line] = None
    return tuple(lines)


def is_file_set(source: TrainSet) -> bool:
    """Whether a set consists of files, which are tokenized through the cache."""
    return source.path != RANDOM and not source.path.startswith("builtin:")


def questions_of(source: TrainSet) -> list[formats.Example]:
    """The questions of a built-in set. Raises UserError if the set or the split does not exist."""
    if source.path != TASKS:
        raise UserError(f"{source.path}: the built-in sets are {TASKS} and {RANDOM}")
    if source.split == "train":
        asked = tasks.questions("train", tasks.TRAIN_QUESTIONS)
    elif source.split == "test":
        asked = tasks.questions("test", tasks.TEST_QUESTIONS)
    else:
        raise UserError(f'{TASKS}: the splits are "train" and "test", not {source.split!r}')
    return [formats.Example(TASKS, line, messages=one.messages) for line, one in enumerate(asked, 1)]


def _random_stream(length: int, vocab_size: int | None) -> Stream:
    if vocab_size is None:
        raise UserError(f"{RANDOM}: needs the vocabulary's size")
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(vocab_size, (length,), generator=generator) for _ in range(RANDOM_ROWS))
    learned = np.ones(length, bool)
    return gather((Document(line, ids.int().numpy(), learned) for line, ids in enumerate(drawn, 1)), RANDOM)


def _pad_id(tokenizer: Any, vocab_size: int | None) -> int:
    """The tokenizer's padding token, or 0 if it has none or one beyond the model's vocabulary.

    Any token will do, because padding is never supervised and is a document of its own.
    """
    pad = None if tokenizer is None else tokenizer.pad_token_id
    return 0 if pad is None or (vocab_size is not None and pad >= vocab_size) else pad
