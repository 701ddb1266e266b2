"""Whether the tokens and the mask of a conversation are right, found without the code that makes them.

The texts of the row are searched for in the decoded tokens; where a turn begins and ends is looked up in the table of
`families.py`. What a template leaves out is found by rendering with transformers alone.
"""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from benchmarks.chat_templates.conversations import Leaf, Row, leaves
from benchmarks.chat_templates.families import Family
from rptrain.data.formats import Tally

# What may be between the opener of a turn and its first supervised token: the beginning of an empty thought.
PREFILL = re.compile(r"\s*(?:(?:</?[\w:]*think[\w:]*>|\[/?THINK\]|</?thinking>)\s*)*")
TOOLS = Leaf(0, "description of tools", "", False)
# Exceptions of a template's expressions, beside its own.
FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that are all supervised or all not."""

    supervised: bool
    text: str
    last: str  # token


@dataclass(frozen=True)
class Result:
    """What was made of a conversation: tokens, or the reason why there are none."""

    ids: list[int] | None
    supervised: list[bool]
    reason: str
    tally: Callable[[], Tally]  # of this conversation alone


class Template:
    """A chat template with its tokenizer and the table's entry. Renders rows with transformers."""

    def __init__(self, name: str, text: str, family: Family, tokenizer: Any):
        self.name, self.text, self.family, self.tokenizer = name, text, family, tokenizer
        self.marked = bool(re.search(r"\{%-?\s*generation\b", text))

    def render(self, messages: list[Row], tools: list[Row] | None, prompt: bool = False) -> str | None:
        """The text of a conversation; None if the template refuses it."""
        try:
            return self.tokenizer.apply_chat_template(
                deepcopy(messages),
                tools=deepcopy(tools),
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except FAILURES:
            return None

    @cached_property
    def prefill(self) -> str:
        """What the generation prompt writes after the opener of a turn."""
        question = [{"role": "user", "content": "?"}]
        prompted = self.render(question, None, prompt=True) or ""
        opener = max(self.family.opens, key=prompted.rfind)
        return prompted.rpartition(opener)[2] if opener in prompted else ""

    def renderings(self, row: Row) -> Iterator[str]:
        """The texts of a row in the forms that templates read: as it is, with arguments as JSON text, with `tools`."""
        bare = [{key: value for key, value in message.items() if key != "train"} for message in row["messages"]]
        empty = [{**message, "content": message["content"] or ""} for message in bare]
        for messages in (bare, empty, _with_json_arguments(bare), _with_json_arguments(empty)):
            for tools in (row.get("tools"),) if row.get("tools") else (None, []):
                if (text := self.render(messages, tools)) is not None:
                    yield text


def _with_json_arguments(messages: list[Row]) -> list[Row]:
    changed = deepcopy(messages)
    for message in changed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return changed


def judge(template: Template, row: Row, result: Result) -> str:
    """The verdict: "trained", "noted: …", "refused: …" or "FAULT: …"."""
    if result.ids is None:
        return _judge_refusal(template, row, result.reason)
    segments = segments_of(template.tokenizer, result.ids, result.supervised)
    whole = "".join(segment.text for segment in segments)
    lost = _lost(row, whole)
    noted = [leaf for leaf in lost if _is_left_out_by_design(template, row, leaf)]
    if dropped := [leaf for leaf in lost if leaf not in noted]:
        return f"FAULT: dropped in silence: {_described(dropped)}"
    faults = [*_wrong_masks(row, lost, segments, whole), *_wrong_bounds(template, row, result, segments)]
    if faults:
        return f"FAULT: {'; '.join(dict.fromkeys(faults))}"
    if noted and not any(key.startswith("earlier") for key in result.tally().notes):
        return f"FAULT: not noted: {_described(noted)}"
    return f"noted: {_described(noted)}" if noted else "trained"


def _judge_refusal(template: Template, row: Row, reason: str) -> str:
    for text in template.renderings(row):
        lost = _lost(row, text)
        if all(_is_left_out_by_design(template, row, leaf) for leaf in lost):
            return f"FAULT: refused, but the template writes all of it: {reason}"
    return f"refused: {reason}"


def _lost(row: Row, text: str) -> list[Leaf]:
    """The texts of a row that are not in a text; one of the descriptions of tools stands for all."""
    found = [leaf for leaf in leaves(row) if not _places(leaf, text)]
    names = [tool["function"]["description"] for tool in row.get("tools", ())]
    return found if not names or any(name in text for name in names) else [*found, TOOLS]


def _is_left_out_by_design(template: Template, row: Row, leaf: Leaf) -> bool:
    """Whether a text of an earlier turn is written if the conversation ends with its turn."""
    if leaf is TOOLS or leaf.turn == len(row["messages"]) - 1:
        return False
    cut = {**row, "messages": row["messages"][: leaf.turn + 1]}
    return any(_places(leaf, text) for text in template.renderings(cut))


def _described(some: list[Leaf]) -> str:
    return ", ".join(dict.fromkeys(f"{leaf.kind} of turn {leaf.turn + 1}" for leaf in some))


def _places(leaf: Leaf, text: str) -> list[tuple[int, int]]:
    """Where the text of a leaf is, in the first of its forms that is there."""
    for form in leaf.forms:
        if found := [match.span() for match in re.finditer(re.escape(form), text)]:
            return found
    return []


def segments_of(tokenizer: Any, ids: list[int], supervised: list[bool]) -> list[Segment]:
    found = list[Segment]()
    start = 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or supervised[stop] != supervised[start]:
            text = tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False)
            found.append(Segment(supervised[start], text, tokenizer.decode([ids[stop - 1]])))
            start = stop
    return found


def _wrong_masks(row: Row, lost: list[Leaf], segments: list[Segment], whole: str) -> Iterator[str]:
    """Texts of the assistant that are not supervised, and others that are."""
    spans, start = list[tuple[int, int]](), 0
    for segment in segments:
        if segment.supervised:
            spans.append((start, start + len(segment.text)))
        start += len(segment.text)
    for leaf in leaves(row):
        if leaf in lost:
            continue
        places = _places(leaf, whole)
        inside = [any(begin <= first and last <= end for begin, end in spans) for first, last in places]
        beside = [any(begin < last and first < end for begin, end in spans) for first, last in places]
        if leaf.trained and not (any(inside) if leaf.repeated else all(inside)):
            yield f"{leaf.kind} of turn {leaf.turn + 1} is not supervised"
        if not leaf.trained and not leaf.repeated and any(beside):
            yield f"{leaf.kind} of turn {leaf.turn + 1} is supervised"


def _wrong_bounds(template: Template, row: Row, result: Result, segments: list[Segment]) -> Iterator[str]:
    """Supervised spans that do not begin after the opener of a turn, or do not end with its end."""
    family = template.family
    turns = [turn for turn, message in enumerate(row["messages"]) if _is_trained(message)]
    if not any(segment.supervised for segment in segments):
        yield "nothing is supervised"
        return
    for number, segment in enumerate(segments):
        if not segment.supervised:
            continue
        before = segments[number - 1].text if number else ""
        after = segments[number + 1].text if number + 1 < len(segments) else ""
        if not template.marked:
            yield from _wrong_begin(template, segment.text, before)
        yield from _wrong_end(template, segment, after, not after.strip() and turns[-1] == len(row["messages"]) - 1)
    last = row["messages"][-1]
    if _is_trained(last) and segments[-1].supervised:
        token = segments[-1].last
        if token not in family.eos and result.ids is not None and list(result.tally().ends) != [result.ids[-1]]:
            yield f"the last turn ends with {token!r}, which is neither an EOS nor counted as an end"
        yield from _wrong_appended(template, row, segments)


def _is_trained(message: Row) -> bool:
    return message.get("train", message["role"] == "assistant")


def _wrong_begin(template: Template, text: str, before: str) -> Iterator[str]:
    opens = template.family.opens
    if not template.family.inside and any(opener in text for opener in opens):
        yield "the opener of a turn is supervised"
    found = max((before.rfind(opener) + len(opener) for opener in opens if opener in before), default=-1)
    if found < 0:  # a template without an opener, at the beginning or after the result of a tool
        found = max((before.rfind(token) + len(token) for token in template.tokenizer.all_special_tokens), default=0)
    gap = before[found:]
    resumed = before.endswith(template.family.resumes) if template.family.resumes else False
    if gap != template.prefill and not PREFILL.fullmatch(gap) and not resumed:
        yield f"a span begins after {gap[-60:]!r}"


def _wrong_end(template: Template, segment: Segment, after: str, is_last: bool) -> Iterator[str]:
    family = template.family
    ends = [*family.ends, *(eos for eos in family.eos if not any(opener.startswith(eos) for opener in family.opens))]
    if segment.last in ends:
        return
    following = after.lstrip()
    if segment.text.rstrip().endswith(tuple(ends)):
        yield f"a span ends after its end token, with {segment.text[-30:]!r}"
    elif any(following.startswith(end) for end in ends):
        yield f"the end {following[:20]!r} of a turn is not supervised"
    elif is_last or family.ends:
        yield f"a turn has no end: {segment.text[-30:]!r}"


def _wrong_appended(template: Template, row: Row, segments: list[Segment]) -> Iterator[str]:
    """A last turn that ends with another EOS than the table says, if the template writes none."""
    if template.family.after is not None:
        right = template.family.after[bool(row["messages"][-1].get("tool_calls"))]
        if segments[-1].last != right:
            yield f"the last turn ends with {segments[-1].last!r} instead of {right!r}"
