"""Conversion of conversations in common formats to lists of messages for chat templates."""

from typing import Any

from rptrain.data.calls import tools_beside, tools_of
from rptrain.data.messages import Message, is_trained, messages_of
from rptrain.data.notes import key_of
from rptrain.data.values import check_not_python, is_blank, json_of, list_of, object_of, text_of

NOTHING = (None, "", "[]", "{}", [], {})  # values of variables that change no template


def chat(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Fields of an Example for the conversation under `key`, with the row's `system` and `tools`, if any."""
    turns = list_of(row, key)
    if not turns:
        raise ValueError(f"`{key}` is not a list with at least one message")
    notes = set[str]()
    messages, learned = messages_of(turns, notes)
    return _conversation(row, messages, learned, notes)


def alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """Stanford Alpaca's keys, with LLaMA-Factory's `system`, `tools` and `history`: its answers are trained on too."""
    instruction, answer = text_of(row, "instruction"), text_of(row, "output")
    more = text_of(row, "input") if row.get("input") is not None else ""
    messages: list[Message] = []
    if row.get("system"):
        messages.append({"role": "system", "content": text_of(row, "system")})
    earlier = list_of(row, "history") if row.get("history") else []
    for pair in earlier:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(said, str) for said in pair)):
            raise ValueError("`history` is not a list of pairs of texts")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(filter(None, (instruction, more)))
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    notes = set[str]()
    _check_variables(row)
    if tools := tools_beside(row, notes):
        notes.add(key_of("fields"))
    return {"messages": messages, "tools": tools, "notes": notes}


def prompt_completion(row: dict[str, Any]) -> dict[str, Any]:
    """TRL's keys: two texts, to which no template is applied, or two lists of messages. The prompt is context only.

    The lists may be JSON text, as in CSV.
    """
    notes = set[str]()
    if isinstance(row.get("prompt"), str) and not isinstance(row.get("completion"), list):
        prompt, completion = text_of(row, "prompt"), text_of(row, "completion")
        listed = {"prompt": _is_chat(prompt, "prompt"), "completion": _is_chat(completion, "completion")}
        if not any(listed.values()):
            if not completion:
                raise ValueError("`completion` is empty")
            if not is_blank(row.get("system")):
                raise ValueError("`system` stands beside two texts: write it into `prompt`, or give lists of messages")
            if tools_beside(row, notes):
                raise ValueError("tools stand beside two texts: give lists of messages, or leave them out")
            return {"text": prompt + completion, "prompt": len(prompt), "notes": notes}
        if not all(listed.values()):
            one, other = sorted(listed, key=lambda key: not listed[key])
            raise ValueError(f"`{one}` is a list of messages, but `{other}` is text: write both in the same way")
        notes.add(key_of("json_text", "prompt"))
    if any(map(is_trained, prompt := list_of(row, "prompt"))):
        raise ValueError("a message of `prompt` has a flag that trains on it: move it to `completion`")
    asked, _ = messages_of(prompt, notes)
    answered, learned = messages_of(list_of(row, "completion"), notes)
    if not answered:
        raise ValueError("`completion` is empty")
    if row.get("system"):
        notes.add(key_of("fields"))
    return _conversation(row, asked + answered, [*[False] * len(asked), *learned], notes)


def raw_text(row: dict[str, Any]) -> dict[str, Any]:
    if not (text := text_of(row, "text")).strip():
        raise ValueError("`text` is empty")
    return {"text": text}


def _conversation(row: dict[str, Any], messages: list[Message], learned: list[bool], notes: set[str]) -> dict[str, Any]:
    """Fields of an Example, with the row's `system` unless the messages have one, and its tools."""
    if row.get("system") and messages[0]["role"] == "system" and messages[0]["content"] != row["system"]:
        raise ValueError("`system` of the row and the first message are two system prompts: keep one of them")
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(row, "system")})
        learned.insert(0, False)
    _check_variables(row)
    if not is_blank(row.get("documents")):
        notes.add(key_of("unread_key", "documents"))
    return {"messages": messages, "learned": tuple(learned), "tools": tools_of(row, notes), "notes": notes}


def _check_variables(row: dict[str, Any]) -> None:
    """Raises ValueError if a row has variables for the chat template."""
    given = object_of(row.get("chat_template_kwargs"))
    if isinstance(given, dict) and (names := [name for name, value in given.items() if value not in NOTHING]):
        raise ValueError(
            f"`chat_template_kwargs` has {', '.join(map(repr, names))}, which is not passed on: write the value into "
            "`data.chat_template`, or leave it out of the row"
        )


def _is_chat(text: str, key: str) -> bool:
    """Whether a text is a JSON list of messages. Raises ValueError if it is one as Python prints it."""
    check_not_python(text, key)
    if not text.lstrip().startswith("["):
        return False
    try:
        turns = json_of(text)
    except ValueError:
        return False
    return bool(turns) and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns)
