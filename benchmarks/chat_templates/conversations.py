"""Fifteen conversations, in the form of rows of a data file, and what of each must be in the tokens.

Every text is found nowhere else in its conversation, so that it can be searched for.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

THOUGHT = re.compile(r"<think>\s*(.*?)\s*</think>\s*", re.DOTALL)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks up the sky over a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    },
}
ORDER = {
    "type": "function",
    "function": {
        "name": "place_order",
        "description": "Buys things in a shop.",
        "parameters": {
            "type": "object",
            "properties": {"items": {"type": "array", "items": {"type": "string"}}, "payment": {"type": "object"}},
            "required": ["items"],
        },
    },
}
TOOLS = [WEATHER, ORDER]


def _call(identity: str, name: str, **arguments: Any) -> Row:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(content: str) -> Row:
    return {"role": "user", "content": content}


def _assistant(content: str | None, *calls: Row, **more: Any) -> Row:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def _tool(identity: str, name: str, content: str) -> Row:
    return {"role": "tool", "tool_call_id": identity, "name": name, "content": content}


def _asked(*turns: Row) -> Row:
    """A conversation about the weather of one town, with a call in the second turn of the assistant."""
    first = [_user("Which towns lie by the sea?"), _assistant("Kiel and Rostock do.")]
    return {"messages": [*first, _user("How is it in Kiel now?"), *turns], "tools": TOOLS}


SUNNY = _tool("call00001", "get_weather", '{"sky": "cloudless", "celsius": 19}')
KIEL = _call("call00001", "get_weather", town="Kiel-Holtenau", days=3741)

CONVERSATIONS: dict[str, Row] = {
    "one turn": {"messages": [_user("Name a metal."), _assistant("Copper, for one.")]},
    "system and two turns": {
        "messages": [
            {"role": "system", "content": "Answer as a blacksmith would."},
            _user("What melts first?"),
            _assistant("Tin melts first."),
            _user("And what comes last?"),
            _assistant("Tungsten comes last."),
        ]
    },
    "escapes, and a turn left out": {
        "messages": [
            _user('He said "grün" and left:\n\n\t<b>5 & 6</b>'),
            {**_assistant("Not this one, which is wrong."), "train": False},
            _user("Again, please.\n"),
            _assistant('Said he: "grün\\blau"?\n\n```python\nprint({"a": [1, 2]})\n```\nДа, 好, 🙂!'),
        ]
    },
    "thought in a field": {
        "messages": [
            _user("How much is 17 and 25?"),
            _assistant("It is 42.", reasoning_content="Seven and five make twelve."),
        ]
    },
    "thoughts in fields": {
        "messages": [
            _user("Which month is shortest?"),
            _assistant("February is.", reasoning_content="It alone lacks a thirtieth day."),
            _user("And in leap years?"),
            _assistant("Still the same one.", reasoning_content="Twenty-nine stays below thirty."),
        ]
    },
    "thoughts in the content": {
        "messages": [
            _user("Is 91 a prime?"),
            _assistant("<think>\nSeven divides it.\n</think>\n\nNo, it is not."),
            _user("Is 97?"),
            _assistant("<think>\nNothing below ten divides it.\n</think>\n\nYes, that one is."),
        ]
    },
    "call, content empty": _asked(_assistant("", KIEL), SUNNY, _assistant("Clear, nineteen degrees.")),
    "call, content null": _asked(_assistant(None, KIEL), SUNNY, _assistant("Clear, nineteen degrees.")),
    "call, content text": _asked(
        _assistant("Let me look outside.", KIEL), SUNNY, _assistant("Clear, nineteen degrees.")
    ),
    "several calls": _asked(
        _assistant(
            "",
            _call("call00001", "get_weather", town="Kiel-Holtenau", days=3741),
            _call(
                "call00002", "place_order", items=["umbrella", "raincoat"], payment={"card": "visa-4411", "tip": 825.75}
            ),
        ),
        SUNNY,
        _tool("call00002", "place_order", "Both were shipped."),
        _assistant("Clear, and you are equipped."),
    ),
    "call last": _asked(_assistant("", KIEL)),
    "reply first": {
        "messages": [_assistant("Welcome aboard!"), _user("When do we sail?"), _assistant("At noon precisely.")]
    },
    "consecutive roles": {
        "messages": [
            _user("I have a question."),
            _user("Why is copper red?"),
            _assistant("Because of its electrons."),
            _assistant("They absorb the blue part."),
        ]
    },
    "developer": {
        "messages": [
            {"role": "developer", "content": "Speak like a sailor."},
            _user("Where is the anchor?"),
            _assistant("Below the bow, mate."),
        ]
    },
    "thoughts and a call": _asked(
        _assistant("", KIEL, reasoning_content="I cannot know without looking."),
        SUNNY,
        _assistant("Clear, nineteen degrees.", reasoning_content="The report is plain."),
    ),
}


@dataclass(frozen=True)
class Leaf:
    """A text of a row that must be in its tokens."""

    turn: int
    kind: str  # "content", "thought", "call name" or "argument"
    text: str
    trained: bool
    repeated: bool = False  # a name or a key, which other texts may have, too

    @property
    def forms(self) -> list[str]:
        """The text as templates write it: without the white space around it, or as JSON text."""
        bare = self.text.strip()
        return list(dict.fromkeys([bare, json.dumps(bare, ensure_ascii=False)[1:-1], json.dumps(bare)[1:-1]]))


def leaves(row: Row) -> Iterator[Leaf]:
    for turn, message in enumerate(row["messages"]):
        trained = message.get("train", message["role"] == "assistant")
        thoughts = [message["reasoning_content"]] if message.get("reasoning_content") else []
        content = message["content"] or ""
        if message["role"] == "assistant":
            thoughts += THOUGHT.findall(content)
            content = THOUGHT.sub("", content)
        yield from (Leaf(turn, "thought", thought, trained) for thought in thoughts)
        if content:
            yield Leaf(turn, "content", content, trained)
        for call in message.get("tool_calls", ()):
            yield Leaf(turn, "call name", call["function"]["name"], trained, True)
            for key, value in call["function"]["arguments"].items():
                yield Leaf(turn, "argument", key, trained, True)
                yield from (Leaf(turn, "argument", text, trained, name) for text, name in _texts(value))


def _texts(value: Any) -> Iterator[tuple[str, bool]]:
    """The texts in a value, and whether each is a key."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, True
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    else:
        yield (value if isinstance(value, str) else json.dumps(value)), False
