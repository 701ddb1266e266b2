"""Tables of a TOML document: keys are added, and tables of lists added and removed, without parting comments from
what they are about.

The comment above a header such as [[data.train]] is part of the table before it.
"""

from typing import Any

import tomlkit
from tomlkit.items import AoT, Comment, Table

_Lines = list[tuple[Any, Any]]  # keys, None for comments and blank lines, with their items


def add_key(table: Table, key: str, value: Any) -> None:
    """Adds a key after the others of a table, above the comments of what follows."""
    end = _cut_end(table)
    table[key] = value
    _extend(table, end)


def append(tables: AoT | list[Any]) -> None:
    """Adds an empty table in the form of its list: [[data.train]], or train = [{…}]."""
    if not isinstance(tables, AoT):
        tables.append(tomlkit.inline_table())
        return
    added = tomlkit.table()
    if len(tables):
        end = _cut_end(tables[-1])
        tables[-1].add(tomlkit.nl())
        _extend(added, end)
    tables.append(added)


def remove(tables: AoT | list[Any], number: int) -> None:
    """Removes a table and its comments. The comment above the next header stays."""
    if isinstance(tables, AoT):
        end = _cut_end(tables[number])
        if number:
            _cut_end(tables[number - 1])
            _extend(tables[number - 1], end)
        elif len(tables) > 1:  # what is above the list is above the next table now
            tables[1] = _below(end, tables[1])
    del tables[number]


def _cut_end(table: Table) -> _Lines:
    """Removes and returns the comments and blank lines at the end of a table."""
    body, end = table.value.body, _Lines()
    while body and body[-1][0] is None:
        end.insert(0, body.pop())
    return end


def _below(lines: _Lines, table: Table) -> Table:
    """The table with the comments among some lines below its header."""
    found = tomlkit.table()
    found.trivia.comment_ws, found.trivia.comment = table.trivia.comment_ws, table.trivia.comment
    _extend(found, [line for line in lines if isinstance(line[1], Comment)])
    _extend(found, table.value.body)
    return found


def _extend(table: Table, lines: _Lines) -> None:
    for key, item in lines:
        table.append(key, item)
