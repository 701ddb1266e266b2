"""Marks in place of what a conversation says: they show whether and where a chat template writes it.

A conversation is rendered twice: as it is, and with a mark in place of each text. What stands between the marks is then
the template's own, and a mark that is missing stands for a text that the template leaves out. Empty texts stay empty,
so a template takes the same way through both.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rptrain.data.messages import PLAN, THOUGHTS, Message

# Marks are numbers: no filter for letters or escapes changes them, and they stand for numbers, too.
BEGINNINGS = tuple(f"9{number:03d}7{number:03d}1" for number in range(1000))
DIGITS = 5  # of a mark after its beginning
# The tags around a thought in a content, in the form of each family of templates.
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# What templates look for in contents: tags, tokens, and commands such as "/no_think".
TESTED = re.compile(r"<[^<>\s]{2,}>|\[/?[A-Z_]{3,}\]|/[a-z_]{4,}")
QUOTED = re.compile(r"""'((?:[^'\\\n]|\\.)*)'|"((?:[^"\\\n]|\\.)*)\"""")


@dataclass(frozen=True)
class MarkedField:
    """A text of a conversation, or a number among the arguments of a call."""

    turn: int
    name: str  # as an error names it
    value: str | float
    mark: str  # as a template writes it
    thought: bool = False
    call: bool = False  # the name or an argument of a call
    lead: tuple[str, ...] = ()  # spaces and tags before it, since the text before in the same content

    def forms(self) -> Iterator[str]:
        """The texts that a template may write for the value."""
        if isinstance(self.value, str):
            yield self.value
            yield json.dumps(self.value, ensure_ascii=False)[1:-1]
            yield json.dumps(self.value)[1:-1]
            yield repr(self.value)[1:-1]
        else:
            yield json.dumps(self.value)
            yield str(self.value)


@dataclass(frozen=True)
class Marked:
    """A conversation with marks, and the fields that they stand for."""

    messages: list[Message]
    fields: list[MarkedField]
    pattern: re.Pattern[str]  # finds all marks

    def written(self, text: str) -> set[str]:
        """The marks in a rendering."""
        return set(self.pattern.findall(text))


@lru_cache(8)
def tested_texts(template: str) -> tuple[str, ...]:
    """The texts for which a template may search contents: they stay as they are. The longest come first."""
    quoted = {(single or double).replace("\\n", "\n").strip() for single, double in QUOTED.findall(template)}
    found = {text for text in quoted if TESTED.fullmatch(text)}
    return tuple(sorted(found | {tag for tags in TAGS for tag in tags}, key=lambda text: (-len(text), text)))


def mark(messages: list[Message], tools: Any, template: str, *, calls: bool = True) -> Marked:
    """The conversation with marks. `calls`: also in names and arguments of calls.

    Raises ValueError if the conversation leaves no number free for marks.
    """
    return _Marker(messages, tools, template).marked(calls)


class _Marker:
    def __init__(self, messages: list[Message], tools: Any, template: str):
        self._messages = messages
        used = json.dumps([messages, tools], default=str) + template
        beginning = next((text for text in BEGINNINGS if text not in used), None)
        if beginning is None:
            raise ValueError("it has too many numbers: none is left to mark its texts")
        self._beginning = beginning
        self._pattern = re.compile(f"{beginning}[0-9]{{{DIGITS}}}")
        self._tested = re.compile("(" + "|".join(map(re.escape, tested_texts(template))) + ")")
        self._fields = list[MarkedField]()

    def marked(self, calls: bool) -> Marked:
        messages = [self._message(turn, message, calls) for turn, message in enumerate(self._messages)]
        return Marked(messages, self._fields, self._pattern)

    def _message(self, turn: int, message: Message, calls: bool) -> Message:
        changed = dict(message)
        thoughts = dict[str, str]()  # a thought may stand under several names
        for name in (*THOUGHTS, PLAN):
            if isinstance(text := message.get(name), str):
                if text not in thoughts:
                    thoughts[text] = self._core(turn, f"`{name}`", text, thought=True)
                changed[name] = thoughts[text]
        if isinstance(text := message.get("content"), str):
            changed["content"] = self._content(turn, text)
        if calls and (made := message.get("tool_calls")):
            changed["tool_calls"] = [self._call(turn, number, call) for number, call in enumerate(made, 1)]
        return changed

    def _content(self, turn: int, text: str) -> str:
        """The text with its tags and outer spaces, and marks in place of all else."""
        parts = self._tested.split(text)
        thoughts = _thoughts(parts)
        lead = list[str]()
        for number in range(0, len(parts), 2):
            name = "the thought in `content`" if number in thoughts else "`content`"
            count = len(self._fields)
            parts[number] = self._core(turn, name, parts[number], thought=number in thoughts)
            if len(self._fields) > count:
                before, _, after = parts[number].partition(self._fields[count].mark)
                self._fields[count] = replace(self._fields[count], lead=(*lead, before))
                lead = [after]
            else:
                lead.append(parts[number])
            lead += parts[number + 1 : number + 2]  # a tag
        return "".join(parts)

    def _core(self, turn: int, name: str, text: str, *, thought: bool) -> str:
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core)
        return before + self._add(turn, name, core, thought=thought) + after

    def _add(self, turn: int, name: str, value: str | float, *, thought: bool = False, call: bool = False) -> str:
        text = f"{self._beginning}{len(self._fields):0{DIGITS}d}"
        self._fields.append(MarkedField(turn, name, value, text, thought, call))
        return text

    def _call(self, turn: int, number: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        name = self._add(turn, f"the name of call {number}", function["name"], call=True)
        arguments = self._leaves(turn, f"of call {number}", "", function["arguments"])
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _leaves(self, turn: int, call: str, path: str, value: Any) -> Any:
        name = f"the argument `{path}` {call}"
        if isinstance(value, dict):
            return {
                key: self._leaves(turn, call, f"{path}.{key}" if path else key, leaf) for key, leaf in value.items()
            }
        if isinstance(value, list):
            return [self._leaves(turn, call, f"{path}[{place}]", leaf) for place, leaf in enumerate(value)]
        if isinstance(value, str) and value.strip():
            return self._add(turn, name, value, call=True)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(self._add(turn, name, value, call=True))
        return value  # booleans and nulls have no unmistakable form


def _thoughts(parts: list[str]) -> set[int]:
    """The texts between tags that are thoughts. Their opening tag may be missing, as in a generation prompt."""
    found = set[int]()
    for begin, end in TAGS:
        first = 0
        for number in range(1, len(parts), 2):
            if parts[number] == begin:
                first = number + 1
            elif parts[number] == end:
                found.update(range(first, number, 2))
                first = number + 1
    return found


@dataclass(frozen=True)
class MarkedPlace:
    """A mark in a rendering, and the value in its place in the text."""

    field: MarkedField
    start: int  # characters of the text
    end: int


@dataclass(frozen=True)
class Alignment:
    """The texts of a conversation in a rendering, in order, and what the template writes between them."""

    places: list[MarkedPlace]
    text: str

    def before(self, number: int) -> str:
        """What the template writes before a place."""
        return self.text[self.places[number - 1].end if number else 0 : self.places[number].start]

    def after(self, number: int) -> str:
        """What the template writes after a place."""
        following = self.places[number + 1].start if number + 1 < len(self.places) else len(self.text)
        return self.text[self.places[number].end : following]


def align(text: str, rendered: str, marked: Marked) -> Alignment | None:
    """The places of the fields in `text`, from the rendering with marks.

    None if the template changes what it writes in other ways than by spaces around it and JSON's escapes.
    """
    fields = {field.mark: field for field in marked.fields}
    parts = marked.pattern.split(rendered)
    found = marked.pattern.findall(rendered)
    if not text.startswith(parts[0]):
        return None
    places, at = list[MarkedPlace](), len(parts[0])
    for name, literal in zip(found, parts[1:], strict=True):
        field = fields[name]
        for form in field.forms():
            end = at + len(form)
            if text.startswith(form, at) and text.startswith(literal, end):
                break
        else:
            return None
        places.append(MarkedPlace(field, at, end))
        at = end + len(literal)
    return Alignment(places, text) if at == len(text) else None


def around(layout: Alignment, turn: int) -> tuple[int, int] | None:
    """The numbers of the first and the last place of a turn; None if it has none, or if others stand between.

    A text that is written again elsewhere counts where it is written first.
    """
    first = dict[str, int]()
    for number, place in enumerate(layout.places):
        if place.field.turn == turn:
            first.setdefault(place.field.mark, number)
    if not first:
        return None
    begin, end = min(first.values()), max(first.values())
    if any(layout.places[number].field.turn != turn for number in range(begin, end)):
        return None
    return begin, end
