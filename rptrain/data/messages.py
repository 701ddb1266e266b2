"""Messages of conversations, with OpenAI's keys or ShareGPT's, as chat templates read them."""

from contextlib import suppress
from typing import Any

from rptrain.data.calls import THOUGHT, calls_of, written_calls
from rptrain.data.notes import key_of
from rptrain.data.other_tasks import MEDIA
from rptrain.data.values import is_blank, json_of, object_of, text_of

Message = dict[str, Any]  # "role" and "content" are text; other keys depend on the chat template
# Values of `from` in ShareGPT's files, and in those for axolotl and LLaMA-Factory.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
USUAL = ("user", "assistant", "system", "developer", "tool")
NATIVE = ("observation",)  # names of ROLES that some templates read as roles of their own
# Keys that say whether a message is trained on, and the value that says so.
FLAGS = {
    "weight": True,  # OpenAI's fine-tuning API, and mistral-finetune
    "train": True,  # axolotl's `message_field_training` in its documentation
    "training": True,  # the same in axolotl's examples
    "trainable": True,  # prime-rl, and Tinker's cookbook
    "loss": True,  # ms-swift and AgentInstruct
    "loss_mask": True,  # verl: 1 where the loss counts
    "loss_weight": True,  # LLaMA-Factory's newer format
    "loss_scale": True,  # ms-swift
    "mask": False,  # ShareGPT files for trainers that mask a turn
    "masked": False,  # torchtune's Message
}
FLAG_KEYS = frozenset(FLAGS)
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")  # fields of a thought, in templates and in data
PLAN = "tool_plan"  # the field of a thought before calls in templates of Cohere
THOUGHT_KINDS = ("text", "thinking")  # of the parts of a thought
PARTS_OF_THOUGHTS = ("reasoning_details", "thinking_blocks")  # OpenRouter's and LiteLLM's, with signatures
OLDER_FLAGS = ("weight", "train", "training")  # those that rptrain 0.1.0 knew
# Fields that are part of a conversation, which chat templates may read; other keys are named in a note.
FIELDS = {
    "role",
    "content",
    "from",
    "value",
    "name",
    "tool_calls",
    "tool_call_id",
    "tools",
    "function_call",
    "functions",
    "channel",
    "recipient",
    "documents",
    "citations",
    *FLAGS,
    *THOUGHTS,
    PLAN,
}


def check_row_flags(row: dict[str, Any]) -> set[str]:
    """Notes weights beside the messages or texts of a row. Raises ValueError for flags that leave out some of them."""
    notes = set[str]()
    for key in FLAG_KEYS.intersection(row):
        value = row[key]
        if isinstance(value, str):
            with suppress(ValueError):
                value = json_of(value.strip().lower())
        if key == "loss" and not isinstance(value, bool):  # a measurement
            continue
        if isinstance(value, list) and any(item in (0, 1) and item != FLAGS[key] for item in value):
            raise ValueError(f"`{key}` of the row leaves out some of it: set `{key}` in its messages")
        if isinstance(value, int | float) and value in (0, 1) and value != FLAGS[key]:
            raise ValueError(f"`{key}` of the row leaves it out of training: remove the row, or the key")
        if isinstance(value, float) and value == value and value not in (0, 1):
            notes.add(key_of("unused_weight", key))
    return notes


def is_trained(turn: Any) -> bool:
    """Whether a flag of a message says that it is trained on."""
    flags = object_of(turn)
    return isinstance(flags, dict) and any(flags.get(key) in (0, 1) and flags[key] == FLAGS[key] for key in FLAG_KEYS)


def messages_of(turns: list[Any], notes: set[str]) -> tuple[list[Message], list[bool]]:
    """The messages, and whether each is trained on. Adds keys of notes. Raises ValueError for a bad message."""
    messages, learned, flags = list[Message](), list[bool](), set[str]()
    for item in turns:
        turn = item if isinstance(item, dict) else object_of(item)
        if not isinstance(turn, dict):
            raise ValueError("a message is not an object with `role` and `content`")
        message = _message(turn, notes)
        messages.append(message)
        if FLAG_KEYS.isdisjoint(turn):
            learned.append(message["role"] == "assistant")
            continue
        said = _flags_of(turn, notes)
        flags |= said.keys()
        learned.append(next(iter(said.values()), message["role"] == "assistant"))
    if flags:
        _check_polarity(flags, messages, learned)
    return messages, learned


def _message(turn: dict[str, Any], notes: set[str]) -> Message:
    """A message without flags. Keys without a value, as in tables, are left out."""
    if len(turn) == 2 and isinstance(turn.get("content"), str) and turn.get("role") in USUAL:  # most are
        text_of(turn, "content")
        return dict(turn)
    message = {key: value for key, value in turn.items() if value is not None and key not in FLAGS}
    if not FIELDS.issuperset(message):
        _check_others(message, notes)
    name = "from" if "from" in message else "role"
    written = text_of(message, name)
    message["role"] = _role(written, name, notes)
    text = "value" if name == "from" else "content"
    if name == "from":
        _check_twice(message, turn, text_of(message, "value"))
        message["content"] = message["value"]
        del message["from"], message["value"]
        if message.keys() & FIELDS > {"role", "content"}:
            notes.add(key_of("fields"))
    _read_thoughts(message)
    if written == "function_call":
        said = written_calls(text_of(message, "content"), notes)
        if said is None:
            raise ValueError(f"the `{text}` of a function_call is not JSON")
        message["content"], message["tool_calls"] = said
        return message
    if ("tool_calls" in message or "function_call" in message) and (calls := calls_of(message, notes)):
        message["tool_calls"] = calls
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        role = message["role"]
        message["content"] = "".join(_part(object_of(part), "content", ("text",), role) for part in message["content"])
    _check_tagged(message, text_of(message, "content"))
    return message


def _check_twice(message: Message, turn: dict[str, Any], value: str) -> None:
    """Raises ValueError if a message with `from` and `value` says something else under `role` or `content`."""
    content, role = turn.get("content"), ROLES.get(str(turn.get("role")).strip().lower())
    if isinstance(content, list):
        content = "".join(str(part.get("text")) for part in content if isinstance(part, dict))
    if (not is_blank(content) and str(content).strip() != value.strip()) or role not in (None, message["role"]):
        raise ValueError("a message has `from` and `value`, and another `role` or `content`: keep one of them")


def _read_thoughts(message: Message) -> None:
    """Makes thoughts texts. Raises ValueError for those that are not, and for two that differ."""
    for name in (*THOUGHTS, PLAN):
        if isinstance(value := message.get(name), list):
            parts = (
                part if isinstance(part, str) else _part(object_of(part), name, THOUGHT_KINDS, "assistant")
                for part in value
            )
            message[name] = value = "".join(parts)
        if not isinstance(value, str | None) and not is_blank(value):
            raise ValueError(f"`{name}` is not text")
    thoughts = {text: name for name in THOUGHTS if isinstance(text := message.get(name), str) and text}
    if len(thoughts) > 1:
        raise ValueError(f"a message has several thoughts ({', '.join(thoughts.values())}): keep one of them")


def _check_tagged(message: Message, content: str) -> None:
    """Leaves out blank thoughts beside a thought between tags in the content, which templates would write in addition.

    Raises ValueError if there are two thoughts.
    """
    if not (names := [name for name in THOUGHTS if name in message]) or not THOUGHT.match(content):
        return
    for name in names:
        if not is_blank(message[name]):
            raise ValueError(f"a message has a thought in `{name}` and one between tags in `content`: keep one of them")
        del message[name]


def _check_others(message: Message, notes: set[str]) -> None:
    """Notes keys that are not fields. Raises ValueError for those whose meaning would be lost."""
    for key in sorted(message.keys() - FIELDS):
        if key in MEDIA and not is_blank(message[key]):
            raise ValueError(f"a message has `{key}`: only text can be trained on")
        if key == "train_detail" and not is_blank(message[key]):
            raise ValueError("`train_detail` trains on parts of a message: give the parts messages of their own")
        if key in PARTS_OF_THOUGHTS and _has_text(message[key]) and not any(map(message.get, (*THOUGHTS, PLAN))):
            raise ValueError(f"the thought is in `{key}`: write it as text under `reasoning_content`")
        if key == "refusal" and not is_blank(message[key]) and is_blank(message.get("content")):
            raise ValueError("the answer is in `refusal`: move it to `content`")
        notes.add(key_of("ignored_key", key))


def _has_text(parts: Any) -> bool:
    """Whether one of the parts of a thought is text; others are encrypted."""
    texts = [part.get(key) for part in parts for key in (*THOUGHT_KINDS, "summary")] if _are_objects(parts) else []
    return any(not is_blank(text) for text in texts)


def _are_objects(parts: Any) -> bool:
    return isinstance(parts, list) and all(isinstance(part, dict) for part in parts)


def _role(written: str, name: str, notes: set[str]) -> str:
    """The role of a message. `name`: the key that it stands under."""
    usual = written.strip().lower()
    if usual in ROLES and (name == "from" or usual not in NATIVE):
        role = ROLES[usual]
        if name == "role" and role != written:
            notes.add(key_of("mapped_role", written))
        return role
    if name == "from":
        raise ValueError(f"`from` is {written!r}: it must be one of {', '.join(ROLES)}")
    notes.add(key_of("unknown_role", written))
    return written


def _part(part: Any, key: str, kinds: tuple[str, ...], role: str) -> str:
    """The text of a part of a list under `key`. `kinds`: the types of parts that have a text."""
    kind = part.get("type") if isinstance(part, dict) else part
    if kind not in kinds:
        raise ValueError(f"`{key}` has a part of type {kind!r}: only text can be trained on")
    usual = role == "assistant"
    if flags := [name for name in FLAGS if part.get(name) is not None and (part[name] == FLAGS[name]) != usual]:
        raise ValueError(f"`{flags[0]}` stands in a part of `{key}`: give parts with flags messages of their own")
    return text_of(part, kind)


def _flags_of(turn: dict[str, Any], notes: set[str]) -> dict[str, bool]:
    """The flags of a message, and whether it is trained on, which is the same for all of them."""
    said = dict[str, bool]()
    for key in FLAG_KEYS.intersection(turn):
        if (value := turn[key]) is None:
            continue
        if value not in (0, 1):
            yes, no = ("train on a message", "leave it out")[:: 1 if FLAGS[key] else -1]
            raise ValueError(f"`{key}` is {value!r}: use true or 1 to {yes}, false or 0 to {no}")
        said[key] = bool(value) == FLAGS[key]
        if key not in OLDER_FLAGS:
            notes.add(key_of("flag", key))
    if len(set(said.values())) > 1:
        raise ValueError(f"{' and '.join(f'`{key}`' for key in sorted(said))} of a message contradict each other")
    return said


def _check_polarity(flags: set[str], messages: list[Message], learned: list[bool]) -> None:
    """Raises ValueError if flags that leave messages out leave out all of the assistant's and train on others.

    In some files, `mask` is 1 where the loss counts.
    """
    reverse = sorted(key for key in flags if not FLAGS[key])
    if reverse and any(message["role"] == "assistant" for message in messages):
        roles = {message["role"] for message, counts in zip(messages, learned, strict=True) if counts}
        if roles and "assistant" not in roles:
            raise ValueError(
                f"`{reverse[0]}` is true for all messages of the assistant, which leaves them out, and false for "
                "others: rename it to `loss_mask` if true means to train on a message"
            )
