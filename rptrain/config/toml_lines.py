"""The line of each key in a TOML text, which the standard library's parser does not report."""

import re
import tomllib
from collections.abc import Iterator

MOST = 100_000  # keys whose lines are found
KeyPath = tuple[str | int, ...]  # keys, and indices of array elements

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # the three to five quotes that end it may include two of the text's own
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'"
    r"|\#[^\n]*"
    r"|\n"
    r"|[\[\]{},=.]"
    r"|[^\s\[\]{},=.\#]+",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line, from 1, of every key, table header and array element in a text that `tomllib` accepts.

    Keys after the first MOST may be left out. The prefixes of a dotted key or header stand where they first appear.
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._tokens = self._tokenize(text)
        self._lines: dict[KeyPath, int] = {}
        self._tables: dict[KeyPath, int] = {}  # number of tables in each [[array]] so far
        self._next()

    @staticmethod
    def _tokenize(text: str) -> Iterator[tuple[str, int]]:
        line = 1
        for match in _TOKEN.finditer(text):
            if not match[0].startswith("#"):
                yield match[0], line
            line += match[0].count("\n")

    def _next(self) -> None:
        self._token, self._line = next(self._tokens, ("", 0))

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._token and len(self._lines) < MOST:
            if self._token == "\n":
                self._next()
            elif self._token == "[":
                table = self._header()
            else:
                self._assignment(table)
        return self._lines

    def _header(self) -> KeyPath:
        line = self._line
        self._next()
        is_array = self._token == "["
        if is_array:
            self._next()
        names = self._key()
        table: KeyPath = ()
        for depth, name in enumerate(names, 1):
            table = (*table, name)
            self._lines.setdefault(table, line)
            if is_array and depth == len(names):
                self._tables[table] = self._tables.get(table, 0) + 1
            if table in self._tables:
                table = (*table, self._tables[table] - 1)
                self._lines.setdefault(table, line)
        while self._token == "]":
            self._next()
        return table

    def _key(self) -> list[str]:
        """Reads a dotted key; the token after it is the present one then."""
        names = []
        while self._token not in ("=", "]"):
            if self._token != ".":
                quoted = self._token[0] in "\"'"
                names.append(tomllib.loads(f"k = {self._token}")["k"] if quoted else self._token)
            self._next()
        return names

    def _assignment(self, table: KeyPath) -> None:
        line = self._line
        for name in self._key():
            table = (*table, name)
            self._lines.setdefault(table, line)
        self._next()
        self._value(table)

    def _value(self, path: KeyPath) -> None:
        if self._token == "[":
            self._next()
            index = 0
            while self._token != "]":
                if self._token in (",", "\n"):
                    self._next()
                else:
                    self._lines[*path, index] = self._line
                    self._value((*path, index))
                    index += 1
            self._next()
        elif self._token == "{":
            self._next()
            while self._token != "}":
                if self._token in (",", "\n"):
                    self._next()
                else:
                    self._assignment(path)
            self._next()
        else:  # a number or date is several tokens
            while self._token not in ("", "\n", ",", "]", "}"):
                self._next()
