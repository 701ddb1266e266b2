"""The names that the formats of rows have, and columns of other names that stand for them."""

from collections.abc import Iterable, Iterator, Mapping

# What each format reads from a row, the names that it needs first.
NAMES = {
    "messages": ("messages", "system", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "prompt_completion": ("prompt", "completion", "system", "tools"),
    "alpaca": ("instruction", "output", "input", "system", "history", "tools"),
    "text": ("text",),
}
# Names in other trainers, and what to write instead.
_OTHER_NAMES = {
    name: advice
    for names, advice in {
        "query response": "LLaMA-Factory's prompt, query and response are instruction, input and output here",
        "question answer": "for chats with a template write instruction and output, for plain texts prompt and "
        "completion",
        "chosen rejected": "preferences cannot be trained on",
    }.items()
    for name in names.split()
}


def parse_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Columns by the name that they stand for. Raises ValueError if no format has all of these names, or if two of them
    have one column.
    """
    known = {name for names in NAMES.values() for name in names}
    if unknown := [name for name in columns if name not in known]:
        if known.issuperset(columns.values()):
            raise ValueError('must have the name of the format first: {prompt = "question"}')
        advice = _OTHER_NAMES.get(unknown[0], f"the names are {', '.join(sorted(known))}")
        raise ValueError(f"must have names of a format, and none has `{unknown[0]}`: {advice}")
    for name, column in columns.items():
        if twins := [other for other, same in columns.items() if same == column and other != name]:
            raise ValueError(f'must have another column for `{twins[0]}` than for `{name}`: both are "{column}"')
    if not any(set(columns) <= set(names) for names in NAMES.values()):
        formats = "; ".join(f"{name}: {', '.join(names)}" for name, names in NAMES.items())
        raise ValueError(f"must have names of one format ({formats})")
    return dict(columns)


def fault_of(format: str, columns: Mapping[str, str]) -> str:
    """What is wrong with columns for a format, which may be "auto"; empty if nothing is."""
    if format == "auto" or not (unknown := [name for name in columns if name not in NAMES[format]]):
        return ""
    return f'`{unknown[0]}` is not a name of the format "{format}", which has {", ".join(NAMES[format])}'


def faults_of(
    sets: Iterable[tuple[str, Mapping[str, str] | None]], of_all: Mapping[str, str] | None
) -> Iterator[tuple[int, str]]:
    """What is wrong with the columns of data sets, by their numbers from 0.

    `sets`: their formats and their own columns. `of_all`: the columns of those without their own.
    """
    for number, (format, own) in enumerate(sets):
        if fault := fault_of(format, (of_all or {}) if own is None else own):
            yield number, fault if own is not None else f"{fault}: give this data set its own columns"
