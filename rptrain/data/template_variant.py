"""A chat template for conversations with or without tools, and what it writes around a turn, found by small renderings.

Runs in a child process with limits, like the templates (`render.py`).
"""

import json
import re
from contextlib import suppress
from functools import cached_property
from typing import Any

from rptrain.data.marks import TESTED, mark
from rptrain.data.messages import Message
from rptrain.data.render import Applier, Span, Template, Tools
from rptrain.utils.errors import UserError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "?"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "?",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "?"}}, "required": []},
    },
}


class Variant:
    """A template for conversations with or without tools, and what it writes around a turn of the assistant."""

    def __init__(self, applier: Applier, template: Template, tools: bool):
        self._applier, self.template = applier, template
        self.text = template.variant([PROBE_TOOL] if tools else None)
        self._tools: Tools = [PROBE_TOOL] if tools else None
        self.marks_generation = GENERATION.search(self.text) is not None

    def apply(self, messages: list[Message], tools: Tools, *, prompt: bool = False) -> str:
        return self._applier.apply(self.text, self._readable(messages), tools or self._no_tools, prompt=prompt)

    def generated(self, messages: list[Message], tools: Tools) -> list[Span]:
        return self._applier.generated(self.text, self._readable(messages), tools or self._no_tools)

    def _readable(self, messages: list[Message]) -> list[Message]:
        """The messages with the arguments of calls as JSON text, if the template needs them in this form."""
        if not any(message.get("tool_calls") for message in messages) or not self._needs_json_arguments:
            return messages
        return [_with_json_arguments(message) for message in messages]

    @cached_property
    def _needs_json_arguments(self) -> bool:
        """Whether the template joins the arguments to text: it refuses objects, or writes them as Python does."""
        call = {"type": "function", "id": "a00000000", "function": {"name": "probe", "arguments": {"a": PROBE}}}
        called: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        of_object, of_text = self._rendered_call(called), self._rendered_call(_with_json_arguments(called))
        if of_text is None or of_object is None:
            return of_text is not None
        return "{'a': " in of_object and '{"a": ' in of_text and "'arguments'" not in of_text

    def _rendered_call(self, message: Message) -> str | None:
        with suppress(UserError):
            return self._applier.apply(self.text, [{"role": "user", "content": PROBE}, message], [PROBE_TOOL])
        return None

    @cached_property
    def _no_tools(self) -> Tools:
        """What stands for no tools: an empty list if the template needs one, as templates for tools do."""
        question: list[Message] = [{"role": "user", "content": PROBE}]
        for none in (None, list[dict[str, Any]]()):
            with suppress(UserError):
                self._applier.apply(self.text, question, none)
                return none
        return None

    @cached_property
    def repeats_tags(self) -> bool:
        """Whether the template writes tags of a thought, but does not look for those in a content: both are written."""
        thought = dict.fromkeys(("reasoning_content", "thinking"), PROBE)
        own = self._closing_tags({"content": PROBE, **thought})
        return 0 < own < self._closing_tags({"content": f"<think>\n{PROBE}\n</think>\n\n{PROBE}"})

    def _closing_tags(self, answer: dict[str, Any]) -> int:
        """How many thoughts end in the conversation with this answer; 0 if the template refuses it."""
        with suppress(UserError):
            messages = [{"role": "user", "content": PROBE}, {"role": "assistant", **answer}]
            return self.apply(messages, self._tools).count("</think>")
        return 0

    def check_tools(self, messages: list[Message], tools: Tools) -> None:
        """Raises ValueError if the template ignores tools, as most templates without support for tools do."""
        if tools and "tools" not in self.text:
            raise ValueError("the chat template does not write `tools`")
        if "tool_calls" not in self.text and any("tool_calls" in message for message in messages):
            raise ValueError("the chat template does not write `tool_calls`")

    @cached_property
    def prompt(self) -> str:
        """The generation prompt after a question; empty if there is none, or if the template needs more messages."""
        without, prompted = self._probed(1), self._probed(1, prompt=True)
        return self.rest(prompted[0], without[0]) if without and prompted else ""

    @cached_property
    def opening(self) -> str | None:
        """What the template writes before a turn: the generation prompt, or what takes its place; None: unknown."""
        without, answered = self._probed(1), self._probed(2)
        if self.prompt or without is None or answered is None:
            return self.prompt or None
        return "" if self.always_prompts or self.leading else self.rest(answered[0], without[0])

    @cached_property
    def leading(self) -> str:
        """The spaces that are all that the template writes before a turn: the model writes them, too."""
        without, answered = self._probed(1), self._probed(2)
        between = "" if self.prompt or without is None or answered is None else self.rest(answered[0], without[0])
        return "" if between.strip() else between

    @cached_property
    def always_prompts(self) -> bool:
        """Whether the template writes a generation prompt after every conversation: more after the EOS token."""
        return not self.prompt and self.has_more_after_eos(self.tail or "") is True

    def has_more_after_eos(self, text: str) -> bool | None:
        """Whether other special tokens follow the first EOS token in a text; None: the text has only other tokens."""
        eos = [token in self.template.eos for token in self.tokens_of(text)]
        return not all(eos[eos.index(True) :]) if any(eos) else None

    @cached_property
    def tail(self) -> str | None:
        """What the template writes after the text of a last turn; None if that is unknown."""
        answered = self._probed(2)
        return None if answered is None else answered[1]

    def _probed(self, count: int, *, prompt: bool = False) -> tuple[str, ...] | None:
        """What the template writes after each text of a question, or of a question and an answer; None: it refuses."""
        answer: list[Message] = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        marked = mark(answer, None, self.text)
        try:
            rendered = self.apply(marked.messages[:count], self._tools, prompt=prompt)
        except UserError:
            return None
        _, *after = marked.pattern.split(rendered)
        return tuple(after) if len(after) == count else None

    def rest(self, text: str, other: str) -> str:
        """A text without the pieces at its beginning that the other begins with, too."""
        pieces, others = self._pieces(text), self._pieces(other)
        alike = next((n for n, (one, two) in enumerate(zip(pieces, others, strict=False)) if one != two), None)
        return "".join(pieces[min(len(pieces), len(others)) if alike is None else alike :])

    def _pieces(self, text: str) -> list[str]:
        """The tokens, tags, line breaks and words that a text consists of."""
        special = [re.escape(token) for token in self.template.special]
        return re.findall("|".join([*special, TESTED.pattern, "\n", r"[^\n<\[]+", "."]), text)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.template.special)) or "(?!)")

    def tokens_of(self, text: str) -> list[str]:
        """The special tokens in a text."""
        return self._special.findall(text)

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """The beginnings of `opening`, the longest first: turns may lack its end, such as the tag of a thought."""
        pieces = self._pieces(self.opening or "")
        return tuple("".join(pieces[:count]) for count in range(len(pieces) - 1, 0, -1))

    @cached_property
    def opener(self) -> str:
        """The special token that a turn begins with; empty without one."""
        opening = (self.opening or "").lstrip()
        return next((token for token in self.template.special if opening.startswith(token)), "")


def _with_json_arguments(message: Message) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    functions = (call["function"] for call in calls)
    texts = (function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)} for function in functions)
    return {**message, "tool_calls": [call | {"function": text} for call, text in zip(calls, texts, strict=True)]}
