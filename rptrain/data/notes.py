"""Notes about rows of data that a plan and the log of a run report, as counts of rows by kind."""

from collections import Counter
from dataclasses import dataclass

from rptrain.utils.text import counted


@dataclass(frozen=True)
class Note:
    """A kind of note. In `sentence`, {rows} stands for the number of rows, {details} for what was found in them.

    `rule` names the rule by which tokens or masks differ from those of rptrain 0.1.0; empty: they do not differ.
    """

    sentence: str
    rule: str = ""


NOTES = {
    "ignored_key": Note("{rows}: keys of messages are ignored: {details}"),
    "earlier": Note("{rows}: the chat template leaves out {details} of earlier turns, as it does when it is used"),
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
    "date": Note("", "dates have the format that the chat template asks for"),
    "bos": Note("{rows}: begin with two BOS tokens, of which one is removed", "a second BOS token is removed"),
}


def key_of(kind: str, detail: str = "") -> str:
    """The key under which rows with a note are counted. `kind` is a key of NOTES."""
    assert kind in NOTES
    return f"{kind}:{detail}" if detail else kind


def sentences(notes: Counter[str]) -> list[str]:
    """A sentence for each kind of note, in the order of NOTES."""
    found = list[str]()
    for kind, note in NOTES.items():
        counts = {key.partition(":")[2]: rows for key, rows in sorted(notes.items()) if key.partition(":")[0] == kind}
        if counts and note.sentence:
            rows = counted(max(counts.values()), "row")
            found.append(note.sentence.format(rows=rows, details=", ".join(filter(None, counts))))
    return found


def rules(notes: Counter[str]) -> list[str]:
    """The rules by which tokens or masks of these rows differ from those of rptrain 0.1.0."""
    kinds = {key.partition(":")[0] for key in notes}
    return [note.rule for kind, note in NOTES.items() if kind in kinds and note.rule]
