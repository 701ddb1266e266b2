"""The Modelfile of Ollama beside a GGUF file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rptrain.data.eos import generation_eos
from rptrain.data.loader import load_tokenizer
from rptrain.data.render import render_conversations
from rptrain.data.template import load_template
from rptrain.gguf.turns import Conversation, Turns, find_turns
from rptrain.utils.errors import UserError
from rptrain.utils.text import one_line

NO_CHAT = "the tokenizer has no chat template: Ollama passes prompts on as they are"
UNKNOWN = (
    "the Modelfile has no TEMPLATE, because the chat template cannot be written as one: Ollama takes one of its own if "
    "it recognizes the chat template in the GGUF file, and otherwise passes prompts on as they are"
)


@dataclass(frozen=True)
class Chat:
    """What a Modelfile has of a model's chat: its turns, or why they are unknown; and the texts that end an answer."""

    turns: Turns | None
    stops: tuple[str, ...]
    note: str = ""


def read_chat(model_dir: Path) -> Chat:
    """What a Modelfile has of the chat of an exported model or adapter, by its tokenizer and generation_config.json."""
    tokenizer = load_tokenizer(model_dir)
    ids = [*generation_eos(model_dir), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    stops = tuple(str(token) for token in tokenizer.convert_ids_to_tokens(list(dict.fromkeys(ids))) if token)
    try:
        template = load_template(tokenizer, None)
    except UserError:
        return Chat(None, stops, NO_CHAT)

    def render(conversations: Sequence[Conversation]) -> list[str]:
        chats = [[{"role": role, "content": text} for role, text in each] for each in conversations]
        return render_conversations(tokenizer, template, chats)

    turns = find_turns(render, _added_bos(tokenizer))
    return Chat(turns, stops, "" if turns else UNKNOWN)


def text_of(chat: Chat, model: str, adapter: str | None = None) -> str:
    """The Modelfile of a GGUF file or of an adapter for a `model`: paths, relative to the Modelfile's folder."""
    lines = [f"FROM {_quoted(model)}", *([f"ADAPTER {_quoted(adapter)}"] if adapter else [])]
    if chat.turns is not None:
        lines.append(f'TEMPLATE """{chat.turns.go_template()}"""')
        if chat.turns.default_system:
            lines.append(f'SYSTEM """{chat.turns.default_system}"""')
    lines += (f"PARAMETER stop {_quoted(stop)}" for stop in _writable(chat.stops))
    return "\n".join(lines) + "\n"


def _writable(stops: Iterable[str]) -> list[str]:
    """The texts that a line of a Modelfile can have: it has no escapes."""
    return [stop for stop in stops if '"' not in stop and stop == one_line(stop)]


def _quoted(text: str) -> str:
    return f'"{text}"'


def _added_bos(tokenizer: Any) -> str:
    """The text of the BOS token if the tokenizer puts one before a text, as llama.cpp then does; else empty."""
    ids = tokenizer("a").input_ids
    return str(tokenizer.bos_token) if ids and ids[0] == tokenizer.bos_token_id else ""
