"""Notes about rows of data that a plan and the log of a run report, as counts of rows by kind."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rptrain.utils.text import counted, one_line, quoted

DETAILS, SHOWN = 100, 8  # details that are counted in a file, and those of a kind that a sentence names
LONGEST = 60  # characters of a detail


@dataclass(frozen=True)
class Note:
    """A kind of note. In `sentence`, {rows} stands for the number of rows, {details} for what was found in them.
    If it is empty, the kind is not reported.

    `rule` names the rule by which tokens or masks differ from those of rptrain 0.1.0; empty: they do not differ.
    `literal`: whether details are names from the data, which are put in backticks.
    """

    sentence: str
    rule: str = ""
    literal: bool = True


NOTES = {
    "ignored_key": Note("{rows} with keys that only the chat template may read: {details}"),
    "unread_key": Note("{rows} with keys that the chat template does not read: {details}"),
    "earlier": Note(
        "{rows}: the chat template leaves out {details} of earlier turns, as it does when it is used", literal=False
    ),
    "dropped_thought": Note('{rows}: thoughts are left out (data.reasoning = "drop")'),
    "inlined_thought": Note(
        '{rows}: thoughts are written into the content (data.reasoning = "inline")', "thoughts are written inline"
    ),
    "end_token": Note(
        "{rows}: the chat template writes no end token after a reply, so an EOS token of the model ends it",
        "a reply ends with an EOS token where the chat template writes no end token",
    ),
    "end_without_token": Note(
        "{rows}: the chat template ends replies with {details}, which is not a token of the vocabulary: the model "
        "learns it as several tokens and does not stop there"
    ),
    "start": Note(
        "",
        "a reply begins after as much of the generation prompt as the chat template writes, not with its text",
    ),
    "date": Note("", "dates have the format that the chat template asks for"),
    "bos": Note(
        "{rows} with more than one BOS token at the beginning: the first one is kept", "a second BOS token is removed"
    ),
    "unknown_role": Note(
        "{rows} with roles that only some chat templates have, and that are not trained on: {details}"
    ),
    "mapped_role": Note(
        "{rows}: roles are read as the usual ones, such as `human` as `user`: {details}",
        "roles under other names, such as `human` and `function`, are read as the usual ones",
    ),
    "flag": Note(
        "{rows}: messages are trained on or left out as these keys say: {details}",
        "more keys of messages say whether they are trained on, such as `loss` and `mask`",
    ),
    "unused_weight": Note("{rows} with weights other than 0 and 1, which are not used: {details}"),
    "placeholder": Note("{rows}: placeholders are trained on as text, without images, audio or video: {details}"),
    "nulls": Note(
        "{rows}: null fields of Parquet or Arrow structs in calls or tools are left out",
        "null fields of Parquet and Arrow structs are left out",
    ),
    "json_text": Note("", "JSON text is read where messages, tools or objects are expected"),
    "calls": Note("", "tool calls and tools are read in more forms, such as `function_call` and `functions`"),
    "fields": Note("", "fields that were not read, such as the tools of an instruction, reach the chat template"),
    "other_task": Note("", "rows for other tasks, such as preferences or images, are refused"),
}


REFUSED = "rows of which the chat template leaves out a text, and rows for other tasks, are refused"
BOUNDS = "replies begin and end where the chat template shows it, in more templates and conversations"


def key_of(kind: str, detail: str = "") -> str:
    """The key under which rows with a note are counted. `kind` is a key of NOTES."""
    assert kind in NOTES
    return f"{kind}:{detail[:LONGEST]}" if detail else kind


def count(notes: Counter[str], keys: Iterable[str], counted: Iterable[str] = ()) -> None:
    """Counts the notes of a row: once under each kind, and under up to DETAILS kinds and details.

    `counted`: those of the same row that have been counted.
    """
    keys = set(keys)
    notes.update({key.partition(":")[0] for key in keys} - {key.partition(":")[0] for key in counted})
    notes.update(key for key in keys if ":" in key and (key in notes or len(notes) < DETAILS))


def sentences(notes: Counter[str]) -> list[str]:
    """A sentence for each kind of note, in the order of NOTES."""
    found = list[str]()
    for kind, note in NOTES.items():
        if notes[kind] and note.sentence:
            details = sorted(key.partition(":")[2] for key in notes if key.startswith(f"{kind}:"))
            rows = counted(notes[kind], "row")
            found.append(note.sentence.format(rows=rows, details=_listed(details, note.literal)))
    return found


def _listed(details: list[str], literal: bool) -> str:
    named = [f"`{one_line(quoted(detail))}`" if literal else detail for detail in details[:SHOWN]]
    more = [f"and {len(details) - SHOWN} more"] if len(details) > SHOWN else []
    return ", ".join([*named, *more]) or "many"


def rules(notes: Counter[str], bad: int) -> list[str]:
    """The rules by which tokens or masks of rows with these notes may differ from those of rptrain 0.1.0. `bad`: how
    many more rows are bad.
    """
    found = [note.rule for kind, note in NOTES.items() if notes[kind] and note.rule]
    return [*found, REFUSED] if bad else found or [BOUNDS]
