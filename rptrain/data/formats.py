"""Conversion of rows to examples: chats, instructions, prompts with completions, or text; formats are detected."""

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from rptrain.data import chat
from rptrain.data.messages import Message, check_row_flags
from rptrain.data.notes import count, key_of
from rptrain.data.other_tasks import PLACEHOLDERS, OtherTask, check_task
from rptrain.data.read import READERS, rows_of
from rptrain.data.row_format import RowFormat
from rptrain.data.structs import Converted
from rptrain.utils.errors import UserError
from rptrain.utils.suggest import typo_of
from rptrain.utils.text import counted

log = logging.getLogger(__name__)

SHOWN, LONGEST = 5, 1000  # bad rows in a report, and characters of each
REMEDIES = (
    "fix these rows, set the format, write the good rows to a new file with `rptrain data clean`, or raise the limit"
)
BEGINNING = 1 << 20  # characters of a text file that are read if only its first rows are wanted
LOOKED = 1000  # rows that are searched for keys of a format, and for columns
AUTO = RowFormat()


@dataclass(frozen=True)
class Example:
    """A conversation or a text; exactly one is set. `line` counts lines, or rows of a list or a table, from 1."""

    file: str
    line: int
    messages: list[Message] | None = None
    learned: tuple[bool, ...] | None = None  # whether the loss counts each message; None: the assistant's messages
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    prompt: int = 0  # characters at the beginning of `text` that are context only
    notes: tuple[str, ...] = ()  # see `notes.key_of`

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Format:
    keys: frozenset[str]  # a row with all of these has this format
    # Returns the fields of an Example, of which `notes` is a set. Raises ValueError for a bad row.
    parse: Callable[[dict[str, Any]], dict[str, Any]]


FORMATS = {
    "messages": Format(frozenset({"messages"}), lambda row: chat.chat(row, "messages")),
    "sharegpt": Format(frozenset({"conversations"}), lambda row: chat.chat(row, "conversations")),
    "prompt_completion": Format(frozenset({"prompt", "completion"}), chat.prompt_completion),
    "alpaca": Format(frozenset({"instruction", "output"}), chat.alpaca),
    "text": Format(frozenset({"text"}), chat.raw_text),
}


def _line(reason: str) -> int:
    return int(reason.partition(":")[0])


@dataclass
class Tally:
    """Counts of rows and of bad rows."""

    total: int = 0
    bad: int = 0
    first: list[str] = field(default_factory=list)  # the first bad rows as "line: reason"
    shown: int = SHOWN  # bad rows in `first`, at most
    line: int = 0  # of the last row
    notes: Counter[str] = field(default_factory=Counter)  # rows by `notes.key_of`
    ends: Counter[int] = field(default_factory=Counter)  # rows by the token that ends the last turn

    def add(self, line: int, reason: object) -> None:
        """Lines may come in any order: conversations are rendered after more rows have been read."""
        self.bad += 1
        if len(self.first) < self.shown or line < _line(self.first[-1]):
            insort(self.first, f"{line}: {reason}"[:LONGEST], key=_line)
            del self.first[self.shown :]

    @classmethod
    def joined(cls, tallies: Mapping[str, Self]) -> Self:
        """The tally of all these files, with their names before the lines."""
        first = [f"{file}:{line}" for file, tally in tallies.items() for line in tally.first]
        joined = cls(sum(t.total for t in tallies.values()), sum(t.bad for t in tallies.values()), first[:SHOWN])
        for tally in tallies.values():
            joined.notes += tally.notes
            joined.ends += tally.ends
        return joined

    def __add__(self, other: Self) -> Self:
        """The tally of the rows of both, which may be the same rows in two data sets."""
        first = list(dict.fromkeys([*self.first, *other.first]))
        return replace(
            self,
            total=self.total + other.total,
            bad=self.bad + other.bad,
            first=first[:SHOWN],
            notes=self.notes + other.notes,
            ends=self.ends + other.ends,
        )

    def exceeds(self, max_bad_rows: float) -> bool:
        """Whether more rows are bad than `data.max_bad_rows` allows: a number of rows or, below 1, a fraction."""
        return self.bad > (max_bad_rows if max_bad_rows >= 1 else max_bad_rows * self.total)

    def report(self, rows: str = "rows") -> str:
        """The number of bad rows, and the first of them. `rows`: what the counted rows are."""
        first = self.first[:SHOWN]
        more = [f"and {self.bad - len(first)} more"] if self.bad > len(first) else []
        return "\n  ".join([f"{self.bad} of {self.total} {rows} are bad:", *first, *more])

    def judge(self, max_bad_rows: float) -> None:
        """Warns about bad rows. Raises UserError if they are more than `data.max_bad_rows` allows."""
        if self.exceeds(max_bad_rows):
            raise UserError(f"{self.report()}\n{limit_sentence(max_bad_rows)}: {REMEDIES}.")
        if self.bad:
            log.warning("%s\nThese rows are left out.", self.report())


def limit_sentence(max_bad_rows: float) -> str:
    """What `data.max_bad_rows` allows; without a period."""
    if not max_bad_rows:
        allowed = "no row"
    elif max_bad_rows < 1:
        allowed = f"{100 * max_bad_rows:g}% of the rows"
    else:
        allowed = counted(int(max_bad_rows), "row")
    return f"data.max_bad_rows allows {allowed} to be bad"


def read(
    path: str | Path, format: RowFormat = AUTO, tally: Tally | None = None, rows: int | None = None
) -> Iterator[Example]:
    """Yields the examples of a data file, or of its first `rows` rows and, of a text file, of its beginning.

    If the format is "auto", the first row with a format's keys decides for the file, and rows for other tasks are bad.
    Bad rows are left out and counted in `tally`. Raises UserError if the format is unknown, the file has no rows, its
    first rows do not have the columns, or they are for another task.
    """
    path, tally, name = Path(path), tally or Tally(), format.name
    if name != "auto" and name not in FORMATS:
        raise UserError(f"{path}: unknown data format {name!r}; use auto, {', '.join(FORMATS)}")
    found = rows_of(path) if rows is None else rows_of(path, BEGINNING)
    begin = list(islice(found, 1))
    if not begin:
        raise UserError(f"{path}: the file has no rows; remove it, or leave it out of data.train and data.val")
    absent = dict(format.columns)
    while True:
        row = begin[-1][1]
        if isinstance(row, dict):
            absent = {key: column for key, column in absent.items() if column not in row}
            name = (_format_of(path, row, format) or name) if name == "auto" else name
        if not absent and name != "auto":
            break
        more = list(islice(found, 1))
        if not more or len(begin) == LOOKED:
            raise _without_columns(path, begin, absent) if absent else _unknown(path, begin)
        begin += more
    rows_read = islice(chain(begin, found), rows)
    return _parsed(str(path), rows_read, FORMATS[name].parse, tally, format, check=format.name == "auto")


def _parsed(
    file: str,
    rows: Iterable[tuple[int, Any]],
    parse: Callable[[dict[str, Any]], dict[str, Any]],
    tally: Tally,
    format: RowFormat,
    *,
    check: bool,
) -> Iterator[Example]:
    """`check`: whether rows for other tasks, and with flags beside what is trained on, are bad."""
    for line, row in rows:
        tally.total += 1
        tally.line = line
        try:
            if not isinstance(row, dict):
                raise row if isinstance(row, ValueError) else ValueError("not a JSON object")
            row = format.renamed(row)
            if check:
                check_task(row)
            beside = check_row_flags(row) if check else set[str]()
            example = Example(file, line, **_noted(parse(row), row, beside))
        except ValueError as error:
            tally.add(line, format.in_words_of_rows(str(error)))
            if isinstance(error, OtherTask):
                count(tally.notes, [key_of("other_task")])
        else:
            count(tally.notes, example.notes)
            yield example


def _noted(fields: dict[str, Any], row: dict[str, Any], beside: set[str]) -> dict[str, Any]:
    """The fields of an Example with all notes about its row."""
    notes = fields.pop("notes", set[str]()) | beside
    texts = [message["content"] for message in fields.get("messages") or ()] or [fields["text"]]
    notes |= {key_of("placeholder", tag) for text in texts if "<" in text for tag in PLACEHOLDERS if tag in text}
    if isinstance(row, Converted):
        notes |= {*row.notes}
    return {**fields, "notes": tuple(sorted(notes))}


def _format_of(path: Path, row: dict[str, Any], given: RowFormat) -> str | None:
    """The format whose keys a row has. Raises UserError if it has the keys of another task."""
    row = given.renamed(row)
    try:
        check_task(row)
    except OtherTask as error:
        raise UserError(f"{path}: this is {error}") from None
    present = {key for key in row if row[key] is not None}
    return next((name for name, format in FORMATS.items() if given.allows(name) and format.keys <= present), None)


def _unknown(path: Path, rows: list[tuple[int, Any]]) -> UserError:
    """The error for a file of unknown format that begins with these rows."""
    keys = next(({key for key in row if row[key] is not None} for _, row in rows if isinstance(row, dict)), None)
    has = "no values" if not keys else ", ".join(sorted(keys))
    first = (f"its first row: {rows[0][1]}" if keys is None else f"its first row has {has}")[:LONGEST]
    wanted = "; ".join(f"{name}: {', '.join(sorted(format.keys))}" for name, format in FORMATS.items())
    read = (
        "" if path.suffix.lower() in READERS else f" (read as JSON, because its suffix is none of {', '.join(READERS)})"
    )
    return UserError(
        f"{path}: no known data format{read}; {first}. Known formats and their keys: {wanted}. If the columns have "
        'other names, set them: columns = {prompt = "question", completion = "answer"}'
    )


def _without_columns(path: Path, rows: list[tuple[int, Any]], absent: Mapping[str, str]) -> UserError:
    """The error for a file whose first rows have no columns of these names."""
    line, row = next(((line, row) for line, row in rows if isinstance(row, dict)), rows[0])
    name, column = next(iter(absent.items()))
    has = f"its columns are {', '.join(map(repr, row))}" if isinstance(row, dict) else f"its first row: {row}"
    near = typo_of(column, row) if isinstance(row, dict) else None
    hint = f"; did you mean {near!r}?" if near else ""
    return UserError(
        f"{path}:{line}: there is no column {column!r}, which `columns` gives for `{name}`; {has}"[:LONGEST] + hint
    )
