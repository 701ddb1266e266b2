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
        if counts:
            rows = counted(max(counts.values()), "row")
            found.append(note.sentence.format(rows=rows, details=", ".join(filter(None, counts))))
    return found


def rules(notes: Counter[str]) -> list[str]:
    """The rules by which tokens or masks of these rows differ from those of rptrain 0.1.0."""
    kinds = {key.partition(":")[0] for key in notes}
    return [note.rule for kind, note in NOTES.items() if kind in kinds and note.rule]
