"""The turns of a conversation in the text that a chat template writes: what the loss counts, and what is missing.

Runs in a child process with limits, like the templates (`render.py`).

A turn begins after the generation prompt and ends with its end token. `return_assistant_tokens_mask` of transformers
needs templates with `{% generation %}` marks, and returns an all-zero mask for those of Llama, Qwen and others. Turns
are therefore found by what the template writes between the texts of a conversation (`marks.py`); where that does not
decide, by renderings of its beginning.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from rptrain.data.marks import TAGS, TESTED, Marked, MarkedField, align, around, mark
from rptrain.data.messages import THOUGHTS, Message
from rptrain.data.notes import key_of
from rptrain.data.render import Applier, Span, Template, Tools
from rptrain.data.template_variant import Variant
from rptrain.utils.errors import UserError

DATE_FORMAT = re.compile(r"""strftime_now\(\s*["']([^"']*)""")
DATES = ("%Y-%m-%d", "%d %b %Y")  # the formats in which rptrain 0.1.0 wrote the date rightly
NAMED = re.compile(r"""\bm(?:essage|sg)?(?:\.name\b|\[["']name["']\]|\.get\(["']name["'])""")
# A thought between tags before an answer. The model writes it without the opening tag if the prompt has that.
TAGGED = re.compile(r"(?:\s*+<think>(.*?)</think>|((?:(?!<think>).)*?)\n</think>\n)\s*(.*)", re.DOTALL)
HELP = "give a `data.chat_template` that shows it, or set `data.assistant_only_loss = false`"
BESIDE = ("tools", "functions", "documents", "citations")  # fields of messages that few templates read
# Fields of gpt-oss's format, and the values that a plain answer has.
ROUTES = {"channel": ("final",), "recipient": ("all", "user", "assistant")}
NOT_ASKING = ("system", "developer")  # roles whose opening token never ends the turn before

Reasoning = Literal["refuse", "drop", "inline"]


class Rendering(NamedTuple):
    """A conversation's text, the supervised spans of its characters, and notes about it."""

    text: str
    spans: list[Span]
    ends: bool = False  # whether the last span ends with the conversation, in a turn of the assistant
    notes: tuple[str, ...] = ()


class Renderer:
    """Renders conversations with a template. `reasoning`: what becomes of thoughts that the template leaves out."""

    def __init__(self, template: Template, reasoning: Reasoning = "refuse"):
        self._reasoning: Reasoning = reasoning
        self._applier = Applier(template)
        self._variants = {tools: Variant(self._applier, template, tools) for tools in (False, True)}
        self._dated = any(form not in DATES for form in DATE_FORMAT.findall(template.text))

    def render(
        self, messages: list[Message], tools: Tools, learned: Sequence[bool] | None, assistant_only: bool
    ) -> Rendering:
        """The conversation's text and its supervised spans. `learned`: see Example.

        Raises ValueError if the template rejects the conversation, leaves out a text of it, or does not show where a
        turn to train on ends.
        """
        variant = self._variants[bool(tools)]
        variant.check_tools(messages, tools)
        messages, notes = self._with_thoughts(messages, variant)
        found = Conversation(variant, messages, tools)
        notes |= found.check_written(self._reasoning)
        if self._dated:
            notes.add(key_of("date"))
        notes |= _check_unread(variant.text, messages)
        learned = learned or [message["role"] == "assistant" for message in messages]
        last = messages[-1]["role"] == "assistant" and (learned[-1] or not assistant_only)
        turns = [turn for turn, counts in enumerate(learned) if counts]
        if not assistant_only:
            turns = [len(messages) - 1] if last else []
        try:
            spans = [found.span(turn) for turn in turns]
        except ValueError:
            if assistant_only:
                raise
            last, spans = False, []  # all of the text counts, wherever the last turn ends
        text = found.text
        if last and not found.ended:
            text += (ending := found.ending())
            spans[-1] = spans[-1][0], len(text)
            notes |= {key_of("end_token")} if ending else set()
        if not assistant_only:
            spans = [(0, len(text))]
        return Rendering(text, spans, last, tuple(sorted(notes | found.notes)))

    def _with_thoughts(self, messages: list[Message], variant: Variant) -> tuple[list[Message], set[str]]:
        """The conversation with each thought under the names that templates read, or where `reasoning` puts it."""
        notes, changed, text = set[str](), list[Message](), variant.text
        for message in messages:
            if message["role"] == "assistant" and "</think>" in message["content"] and variant.repeats_tags:
                message = _with_field(message)
            thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
            if message["role"] == "assistant" and isinstance(thought, str):
                if reads_thoughts(text):
                    message = {"thinking": thought, **message, "reasoning_content": thought}
                elif self._reasoning != "refuse":
                    message = {key: value for key, value in message.items() if key not in THOUGHTS}
                    notes.add(key_of("dropped_thought" if self._reasoning == "drop" else "inlined_thought"))
                    if self._reasoning == "inline":
                        begin, end = next((tags for tags in TAGS if tags[1] in text), TAGS[0])
                        message["content"] = f"{begin}\n{thought.strip()}\n{end}\n\n{message['content']}"
            changed.append(message)
        return changed, notes


def _with_field(message: Message) -> Message:
    """The message with a thought between tags at the beginning of its content, if there is one, in a field."""
    if (found := TAGGED.match(message["content"])) is None:
        return message
    return {**message, "reasoning_content": found[1] or found[2] or "", "content": found[3]}


def _advice(field: MarkedField, reasoning: Reasoning) -> str:
    """The end of a sentence about a field that is left out: which other `reasoning` trains on its row."""
    if not field.thought or reasoning == "drop":
        return ""
    inline = ' or "inline"' if reasoning == "refuse" and field.name.strip("`") in THOUGHTS else ""
    return f', or set data.reasoning to "drop"{inline}'


def _check_unread(template: str, messages: list[Message]) -> set[str]:
    """Notes fields that the template does not read. Raises ValueError for those that make an answer something else."""
    notes = set[str]()
    for message in messages:
        for name, plain in ROUTES.items():
            if not (value := message.get(name)) or value in plain or _reads(template, name):
                continue
            if message["role"] == "assistant":
                raise ValueError(
                    f"a message has `{name}` {value!r}, which the chat template does not read: write thoughts under "
                    "`reasoning_content`, and calls under `tool_calls`"
                )
            notes.add(name)
        notes |= {name for name in BESIDE if message.get(name) and not _reads(template, name)}
        if message.get("name") and message["role"] != "tool" and not NAMED.search(template):
            notes.add("name")  # that of a tool's result is known from its call
    return {key_of("unread_key", name) for name in notes}


def reads_thoughts(template: str) -> bool:
    """Whether a template reads a field of a thought."""
    return any(_reads(template, name) for name in THOUGHTS)


def _reads(template: str, name: str) -> bool:
    return re.search(rf"""\.{name}\b|["']{name}["']""", template) is not None


def _opened(before: str, openings: Sequence[str]) -> int | None:
    """The end of the first of these openings that is in what the template writes before a turn."""
    return next((at + len(text) for text in openings if (at := before.rfind(text)) >= 0), None)


class Conversation:
    """A rendered conversation. `text` is what the template writes."""

    def __init__(self, variant: Variant, messages: list[Message], tools: Tools):
        self._variant, self._messages, self._tools = variant, messages, tools
        self._special = variant.template.special
        self.text = variant.apply(messages, tools)
        self.notes = set[str]()
        self.ended = True  # whether the last turn that was looked up has an end token
        self._call_tails = list[str]()
        self._marked, self._rendered, self._marks_calls = self._with_marks()
        self._layout = None if self._marked is None else align(self.text, self._rendered, self._marked)

    def _with_marks(self) -> tuple[Marked | None, str, bool]:
        """The conversation with marks, rendered, and whether calls have marks. None if the template refuses marks."""
        for calls in (True, False):
            marked = mark(self._messages, self._tools, self._variant.text, calls=calls)
            try:
                return marked, self._variant.apply(marked.messages, self._tools), calls
            except UserError:
                continue
        return None, "", False

    def check_written(self, reasoning: Reasoning) -> set[str]:
        """Raises ValueError if the template leaves out or changes a text of the conversation, unless it writes it while
        the text's turn is the last. Returns notes about what it leaves out.
        """
        notes = set[str]()
        missing: dict[int, list[MarkedField]] = {}
        for field in self._missing():
            missing.setdefault(field.turn, []).append(field)
        for turn, fields in missing.items():
            cut = self._written_until(turn)
            for field in fields:
                changed = self._marked is not None and field.mark in self._rendered
                if field.mark in cut and not changed:
                    notes.add(key_of("earlier", field.name))
                elif field.thought and reasoning == "drop" and not changed:
                    notes.add(key_of("dropped_thought"))
                else:
                    more = _advice(field, reasoning)
                    does = "changes" if changed else "leaves out"
                    raise ValueError(
                        f"the chat template {does} {field.name} of turn {turn + 1}: give a `data.chat_template` that "
                        f"writes it{more}"
                    )
        return notes

    def _missing(self) -> list[MarkedField]:
        """The texts that the template leaves out. Those that it refuses as marks are looked for in the whole text."""
        fields = [] if self._marked is None else self._marked.fields
        written = set() if self._marked is None else self._marked.written(self._rendered)
        missing = [field for field in fields if field.mark not in written]
        if self._layout is None:  # the template writes other texts than these in another way than their marks
            changed = (field for field in fields if field.mark in written)
            missing += [field for field in changed if not any(form in self.text for form in field.forms())]
        if not self._marks_calls:
            unmarked = mark(self._messages, self._tools, self._variant.text).fields
            unmarked = unmarked if self._marked is None else [field for field in unmarked if field.call]
            missing += [field for field in unmarked if not any(form in self.text for form in field.forms())]
        return missing

    def _written_until(self, turn: int) -> set[str]:
        """The marks that the template writes if the conversation ends with a turn."""
        if self._marked is None or turn == len(self._messages) - 1:
            return set()
        try:
            return self._marked.written(self._variant.apply(self._marked.messages[: turn + 1], self._tools))
        except UserError:
            return set()

    def span(self, turn: int) -> Span:
        """The supervised characters of a turn. Raises ValueError if the template does not show them."""
        places = None if self._layout is None else around(self._layout, turn)
        generated = self._spans_of_turns.get(turn)
        try:
            start, end = self._start(turn, places), self._end(turn, places)
        except ValueError:
            if generated is None:
                raise
            return generated[0], self._trimmed(generated[1])
        if generated is not None:
            start, end = generated[0], max(end, self._trimmed(generated[1]))
        if end < start:
            raise ValueError(f"the chat template does not show where turn {turn + 1} ends: {HELP}")
        return start, end

    def _start(self, turn: int, places: Span | None) -> int:
        begin = None if places is None or self._layout is None else self._layout.places[places[0]].start
        if self._messages[turn]["role"] == "assistant" and self._variant.always_prompts:
            return self._after_prompt(turn, places)
        if self._messages[turn]["role"] == "assistant" and (opening := self._variant.opening) is not None:
            if begin is not None and places is not None and self._layout is not None and opening:
                before = self._layout.before(places[0])
                if (at := _opened(before, (opening,))) is not None:
                    return begin - len(before) + at
            if turn > 0 and (until := self._until(turn, prompt=True)) is not None:
                unprompted = self._messages[turn - 1]["role"] == "assistant" and until == self._until(turn)
                until += "" if self._variant.prompt else opening
                if self.text.startswith(until) and not unprompted:
                    return len(until)
        if begin is None or places is None or self._layout is None:
            raise ValueError(f"the chat template does not show where turn {turn + 1} begins: {HELP}")
        text = self._text_start(begin, places[0])
        if self._messages[turn]["role"] == "assistant":
            if (spaces := self._variant.leading) and self.text.endswith(spaces, 0, text):
                return text - len(spaces)
            before = self._layout.before(places[0])
            opened = _opened(before, self._variant.openings)
            if opened is not None:
                start = begin - len(before) + opened
                if start != text:
                    self.notes.add(key_of("start"))
                return start
        return text

    def _after_prompt(self, turn: int, places: Span | None) -> int:
        """Where a turn begins to differ from the generation prompt that the template always writes."""
        until = self._until(turn)
        if until is not None and places is not None and self._layout is not None:
            begin = self._layout.places[places[0]].start
            own = self._variant.rest(self.text[:begin], until)
            if len(own) <= len(self._layout.before(places[0])):
                return begin - len(own)
        raise ValueError(f"the chat template does not show where turn {turn + 1} begins: {HELP}")

    def _text_start(self, begin: int, place: int) -> int:
        """Where the text of a turn begins, with the tags and spaces before its first part."""
        assert self._layout is not None
        for part in reversed(self._layout.places[place].field.lead):
            if not self.text.endswith(part, 0, begin):
                break
            begin -= len(part)
        return begin

    def _until(self, count: int, *, prompt: bool = False) -> str | None:
        """The first messages as the template writes them; None if it refuses them."""
        try:
            return self._variant.apply(self._messages[:count], self._tools, prompt=prompt)
        except UserError:
            return None

    def _end(self, turn: int, places: Span | None) -> int:
        """The end of the turn's end token; line breaks after it belong to the template. Sets `ended`."""
        whole = self._whole_end(turn, places)
        content = 0 if places is None or self._layout is None else self._layout.places[places[1]].end
        trimmed = self._trimmed(whole)
        tail = self._variant.tail
        if places is not None and self._goes_on(self.text[content:trimmed]):
            return self._cut(turn, content)
        self.ended = trimmed > content and bool(tail is None or tail.strip())
        if "tool_calls" in self._messages[turn] and (tail or "").rstrip().endswith(self._special):
            self.ended = self.text[content:trimmed].endswith(self._special)  # a call may end as no other turn does
        if self.ended:
            if tail is not None and not self.text[:trimmed].endswith(self._special) and TESTED.fullmatch(tail.strip()):
                self.notes.add(key_of("end_without_token", tail.strip()))
            return trimmed
        return self._with_following(turn, whole)

    def _goes_on(self, ending: str) -> bool:
        """Whether what the template writes after a turn has more than its end: an opening, or tokens after an EOS."""
        if (opener := self._variant.opener) and opener in ending:
            return True
        more = self._variant.has_more_after_eos(ending)
        return self._first_opener in self._variant.tokens_of(ending) if more is None else more

    def _cut(self, turn: int, content: int) -> int:
        """The end of a turn after which the template begins another one: after its EOS token, with which the text of
        the conversation ends if the turn is the last.
        """
        length = self._until_eos(self.text[content:])
        if length is None:
            raise ValueError(f"the chat template writes the beginning of another turn after turn {turn + 1}: {HELP}")
        end = content + length
        if turn == len(self._messages) - 1:
            self.text = self.text[:end]
        self.ended = True
        return end

    def _trimmed(self, end: int) -> int:
        """An end without the line breaks after a token."""
        trimmed = self.text[:end].rstrip()
        return len(trimmed) if trimmed.endswith(self._special) else end

    def _with_following(self, turn: int, end: int) -> int:
        """The end of a turn without an end token: after the token that follows, if it ends answers of the model."""
        following = self._messages[turn + 1]["role"] if turn + 1 < len(self._messages) else ""
        for token in self._variant.template.eos:
            opens = following in NOT_ASKING or (following == "assistant" and token == self._variant.opener)
            at = end + len(self.text[end:]) - len(self.text[end:].lstrip())
            if following and not opens and self.text.startswith(token, at):
                self.notes.add(key_of("end_token"))
                return at + len(token)
        return end

    def _whole_end(self, turn: int, places: Span | None) -> int:
        """Where the text of the conversation up to a turn ends in the whole text."""
        if turn == len(self._messages) - 1:
            return len(self.text)
        if places is None or self._layout is None or self._marked is None:
            until = self._until(turn + 1)
            if until is None or not self.text.startswith(until):
                raise ValueError(f"the chat template does not show where turn {turn + 1} ends: {HELP}")
            return len(until)
        end, after = self._layout.places[places[1]].end, self._layout.after(places[1])
        calls = "tool_calls" in self._messages[turn]
        known = [tail for tail in self._call_tails if tail and after.startswith(tail)] if calls else []
        if known:
            return end + len(max(known, key=len))
        tail = self._variant.tail
        content, field = self._messages[turn]["content"].rstrip(), self._layout.places[places[1]].field
        plain = not calls and field.name == "`content`" and content.endswith(str(field.value))
        if plain and tail is not None and after.startswith(tail):
            return end + len(tail)
        if (tail := self._tail_of(turn)) is None:
            tail = self._variant.tail or ""
        if after.startswith(tail):
            if calls:
                self._call_tails.append(tail)
            return end + len(tail)
        return end + self._other_ending(turn, tail, after)

    def _tail_of(self, turn: int) -> str | None:
        """What the template writes after the last text of a turn that is the last; None if it does not tell."""
        assert self._marked is not None
        try:
            cut = self._variant.apply(self._marked.messages[: turn + 1], self._tools)
        except UserError:
            return None
        tail = self._marked.pattern.split(cut)[-1]
        return tail if len(tail) < len(cut) else None

    def _other_ending(self, turn: int, tail: str, after: str) -> int:
        """The length of the end of a turn that ends with another token than it does as the last."""
        assert self._layout is not None
        ending = next((token for token in self._special if tail.rstrip().endswith(token)), "")
        before = tail.rstrip().removesuffix(ending)
        if after.startswith(before) and before.rstrip().endswith(self._special):
            return len(before.rstrip())  # what follows it in the last turn only is the end of the text
        rest = after.removeprefix(before)
        spaces = len(rest) - len(rest.lstrip())
        token = next((token for token in self._special if rest.startswith(token, spaces)), None)
        if token is not None and ending and after.startswith(before):
            if token == self._first_opener:
                return len(before)  # it opens the next turn, so only the last one has an end token
            return len(before) + spaces + len(token)
        if (length := self._until_eos(after)) is None:
            raise ValueError(f"the chat template does not show where turn {turn + 1} ends: {HELP}")
        return length

    def _until_eos(self, text: str) -> int | None:
        """The length of a text up to the end of its first EOS token; None if it has none, or begins a turn before."""
        at = 0
        for token in self._variant.tokens_of(text):
            at = text.index(token, at) + len(token)
            if token == self._variant.opener:
                return None
            if token in self._variant.template.eos:
                return at
        return None

    @cached_property
    def _first_opener(self) -> str:
        """The special token before the first text, which opens a turn; empty without one."""
        return "" if self._layout is None else next(reversed(self._variant.tokens_of(self._layout.before(0))), "")

    @cached_property
    def _spans_of_turns(self) -> dict[int, Span]:
        """The spans that the template marks as generated, by turns of the assistant."""
        if not self._variant.marks_generation:
            return {}
        spans = self._variant.generated(self._messages, self._tools)
        turns = [turn for turn, message in enumerate(self._messages) if message["role"] == "assistant"]
        return dict(zip(turns, spans, strict=True)) if len(turns) == len(spans) else {}

    def ending(self) -> str:
        """The token that ends the last turn where the template writes none; empty if the tokenizer has none."""
        template = self._variant.template
        asked = "<|observation|>" if "tool_calls" in self._messages[-1] else "<|user|>"
        return asked if asked in template.eos else template.end_of_text
