"""Conversion of conversations in common formats to lists of messages for chat templates."""

import json
from typing import Any

Message = dict[str, Any]  # "role" and "content" are text; other keys depend on the chat template
# Values of `from` in ShareGPT's files, and in those for axolotl and LLaMA-Factory.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
FLAGS = ("train", "training", "weight")  # keys for whether a message is trained on: axolotl's and OpenAI's


def text_of(row: dict[str, Any], key: str) -> str:
    """The text under `key`. Raises ValueError if it is missing or not a text."""
    if key not in row:
        raise ValueError(f"`{key}` is missing")
    if not isinstance(row[key], str):
        raise ValueError(f"`{key}` is not text")
    try:
        row[key].encode()
    except UnicodeEncodeError:
        raise ValueError(f"`{key}` has half a character: a lone surrogate") from None
    return row[key]


def chat(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Fields of an Example for the conversation under `key`, with the row's `system` and `tools`, if any."""
    turns = _list_of(row, key)
    if not turns:
        raise ValueError(f"`{key}` is not a list with at least one message")
    messages, learned = _messages(turns)
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(row, "system")})
        learned.insert(0, False)
    return {"messages": messages, "learned": tuple(learned), "tools": _tools(row)}


def alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Stanford Alpaca's keys, with LLaMA-Factory's `system` and `history`, whose answers are trained on too."""
    instruction, answer = text_of(row, "instruction"), text_of(row, "output")
    more = text_of(row, "input") if row.get("input") is not None else ""
    messages: list[Message] = []
    if row.get("system"):
        messages.append({"role": "system", "content": text_of(row, "system")})
    earlier = _list_of(row, "history") if row.get("history") else []
    for pair in earlier:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(said, str) for said in pair)):
            raise ValueError("`history` is not a list of pairs of texts")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(filter(None, (instruction, more)))
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def prompt_completion(row: dict[str, Any]) -> dict[str, Any]:
    """TRL's keys: two texts, to which no template is applied, or two lists of messages. The prompt is context only."""
    if isinstance(row.get("prompt"), str):
        prompt, completion = text_of(row, "prompt"), text_of(row, "completion")
        if not completion:
            raise ValueError("`completion` is empty")
        return {"text": prompt + completion, "prompt": len(prompt)}
    asked, _ = _messages(_list_of(row, "prompt"))
    answered, learned = _messages(_list_of(row, "completion"))
    if not answered:
        raise ValueError("`completion` is empty")
    return {"messages": asked + answered, "learned": (*[False] * len(asked), *learned), "tools": _tools(row)}


def raw_text(row: dict[str, Any]) -> dict[str, Any]:
    if not (text := text_of(row, "text")).strip():
        raise ValueError("`text` is empty")
    return {"text": text}


def _list_of(row: dict[str, Any], key: str) -> list[Any]:
    """A list, or the JSON text of a list, as in tables."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list):
        raise ValueError(f"`{key}` is not a list")
    return value


def _messages(turns: list[Any]) -> tuple[list[Message], list[bool]]:
    """The messages, and whether each is trained on."""
    messages, learned = [], []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError("a message is not an object with `role` and `content`")
        message = _from_value(turn) if "from" in turn else _role_content(turn)
        messages.append(message)
        flags = {_flag(turn, key) for key in FLAGS if turn.get(key) is not None}
        if len(flags) > 1:
            raise ValueError("`train` and `weight` of a message contradict each other")
        learned.append(flags.pop() if flags else message["role"] == "assistant")
    return messages, learned


def _role_content(turn: dict[str, Any]) -> Message:
    """OpenAI's keys. Keys without a value, as in tables, are left out."""
    message = {key: value for key, value in turn.items() if value is not None and key not in FLAGS}
    text_of(message, "role")
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise ValueError("`tool_calls` is not a list")
        message["tool_calls"] = [_call(call) for call in calls]
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(part) for part in message["content"])
    text_of(message, "content")
    return message


def _from_value(turn: dict[str, Any]) -> Message:
    """ShareGPT's keys."""
    speaker = text_of(turn, "from")
    if speaker not in ROLES:
        raise ValueError(f"`from` is {speaker!r}: it must be one of {', '.join(ROLES)}")
    text = text_of(turn, "value")
    if speaker != "function_call":
        return {"role": ROLES[speaker], "content": text}
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("the `value` of a function_call is not JSON") from None
    calls = said if isinstance(said, list) else [said]
    return {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI writes JSON text, which templates would quote again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError("a tool call is not an object with a `function`")
    text_of(function, "name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("the `arguments` of a tool call are not an object")
    outer = call if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return text_of(part, "text")
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"`content` has a part of type {kind!r}: only text can be trained on")


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    if not row.get("tools"):
        return None
    tools = _list_of(row, "tools")
    for tool in tools:
        if not isinstance(tool, dict):
            raise ValueError("`tools` has something that is not an object")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


def _flag(turn: dict[str, Any], key: str) -> bool:
    if turn[key] not in (0, 1):
        raise ValueError(f"`{key}` is {turn[key]!r}: use true or 1 to train on a message, false or 0 to leave it out")
    return bool(turn[key])
