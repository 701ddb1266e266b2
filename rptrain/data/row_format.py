"""How the rows of a data set are read: their format, and the columns that stand for its names."""

import re
from dataclasses import dataclass
from typing import Any

from rptrain.config.columns import NAMES
from rptrain.config.schema import Data, TrainSet
from rptrain.data.structs import Converted


@dataclass(frozen=True)
class RowFormat:
    """A key of FORMATS, or "auto", and pairs of a name and the column that stands for it."""

    name: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, source: TrainSet, data: Data) -> "RowFormat":
        columns = data.columns if source.columns is None else source.columns
        return cls(source.format, tuple(sorted((columns or {}).items())))

    @property
    def key(self) -> list[Any]:
        """For the keys of caches."""
        return [self.name, self.columns]

    def allows(self, format: str) -> bool:
        """Whether a format has all of the names."""
        return all(name in NAMES[format] for name, _ in self.columns)

    def renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with the format's names in place of the columns. Other values under these names are left out."""
        if not self.columns:
            return row
        replaced = {key for pair in self.columns for key in pair}
        made = Converted({key: value for key, value in row.items() if key not in replaced})
        made |= {name: row[column] for name, column in self.columns if column in row}
        made.notes = row.notes if isinstance(row, Converted) else ()
        return made

    def in_words_of_rows(self, reason: str) -> str:
        """What is wrong with a row, with its columns in place of the names in backticks."""
        own = dict(self.columns)
        return re.sub(r"`(\w+)`", lambda match: f"`{own.get(match[1], match[1])}`", reason)
