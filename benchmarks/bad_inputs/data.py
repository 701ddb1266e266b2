"""Data: rows, files, folders and patterns."""

import bz2
import gzip
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.case import PLAN, TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import PICKLE, directory, fifo, link, made, sparse, text
from benchmarks.bad_inputs.sound import CONFIG, lines, row

AREA = "data"
FILE = "data.jsonl"
GOOD = row()
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
MB = 1_000_000


def rows(value: object, count: int = 40) -> str:
    """The same row again and again."""
    return (json.dumps(value) + "\n") * count


def chat(*messages: object, **keys: object) -> str:
    return rows({"messages": list(messages), **keys})


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.jsonl", lines())
    return buffer.getvalue()


CALL = {"type": "function", "function": {"name": "f", "arguments": "{]"}}
DEEP_TOOLS = json.dumps({"messages": [USER, ASSISTANT], "tools": "PLACE"}).replace('"PLACE"', "[" * 400 + "]" * 400)
SURROGATE = '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "b"}]}\n'
# Number, name, content of data.jsonl, and the outcome of a run.
JSONL: tuple[tuple[int, str, str | bytes, Outcome], ...] = (
    (769, "half of the lines broken", (rows(GOOD, 1) + "{]\n") * 20, "refused"),
    (770, "one line of 200 broken", lines(199) + "{]\n", "taken"),
    (771, "rows of several formats", (rows(GOOD, 1) + rows({"text": "a"}, 1)) * 20, "refused"),
    (772, "empty", "", "refused"),
    (773, "line ends", "\n" * 100, "refused"),
    (774, "bytes", bytes(range(256)) * 20, "refused"),
    (775, "UTF-16 without a mark", lines().encode("utf-16-le"), "refused"),
    (776, "UTF-16 with a mark", lines().encode("utf-16"), "refused"),
    (777, "byte order mark", b"\xef\xbb\xbf" + lines().encode(), "taken"),
    (778, "Latin-1", lines().replace("Spell", "é").encode("latin-1"), "refused"),
    (779, "halves of characters", SURROGATE * 40, "refused"),
    (780, "half a character in another key", rows({**GOOD, "\ud800": 1}), "either"),
    (782, "null character in content", chat({"role": "user", "content": "a\0b"}, ASSISTANT), "either"),
    (783, "raw null characters", lines().replace("Spell", "\0"), "refused"),
    (784, "content twice", '{"messages": [{"role": "user", "content": "a", "content": 5}]}\n' * 40, "refused"),
    (785, "deep lists", ("[" * 100_000 + "\n") * 3, "refused"),
    (786, "deep objects", ('{"a":' * 100_000 + "\n") * 3, "refused"),
    (787, "number of 10,000 digits", '{"messages": ' + "9" * 10_000 + "}\n", "refused"),
    (788, "undefined rows", "NaN\n" * 40, "refused"),
    (789, "rows that are lists", "[1, 2]\n" * 40, "refused"),
    (790, "rows that are numbers", "5\n" * 40, "refused"),
    (833, "no roles", chat({"content": "a"}, {"content": "b"}), "refused"),
    (834, "role of null", chat(USER, {"role": None, "content": "b"}), "refused"),
    (835, "unknown role", chat(USER, {"role": "\x1b[31mwizard", "content": "b"}), "either"),
    (836, "questions alone", chat(USER), "refused"),
    (837, "empty answer", chat(USER, {"role": "assistant", "content": ""}), "either"),
    (838, "content of null", chat(USER, {"role": "assistant", "content": None}), "refused"),
    (839, "content that is a number", chat(USER, {"role": "assistant", "content": 5}), "refused"),
    (
        840,
        "picture",
        chat({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ASSISTANT),
        "refused",
    ),
    (841, "calls of tools", chat(USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}), "refused"),
    (842, "arguments that are broken", chat(USER, {**ASSISTANT, "tool_calls": [CALL]}, tools=[{}]), "refused"),
    (843, "calls that are a table", chat(USER, {**ASSISTANT, "tool_calls": CALL}), "refused"),
    (844, "deep tools", (DEEP_TOOLS + "\n") * 40, "refused"),
    (845, "no messages", rows({"messages": []}), "refused"),
    (846, "messages that are a table", rows({"messages": {"a": USER}}), "refused"),
    (847, "messages that are text", rows({"messages": "hello"}), "refused"),
    (848, "messages that are JSON in text", rows({"messages": json.dumps([USER, ASSISTANT])}), "either"),
    (849, "flag that is text", chat(USER, {**ASSISTANT, "train": "maybe"}), "refused"),
    (850, "flag that is a list", chat(USER, {**ASSISTANT, "train": [True]}), "refused"),
    (851, "nothing to train on", chat(USER, {**ASSISTANT, "train": False}), "refused"),
    (852, "unknown sender", rows({"conversations": [{"from": "wizard", "value": "a"}]}), "refused"),
    (853, "no value", rows({"conversations": [{"from": "human"}, {"from": "gpt"}]}), "refused"),
    (
        854,
        "broken call of a function",
        rows({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{]"}]}),
        "refused",
    ),
    (855, "instruction without output", rows({"instruction": "a", "output": None}), "refused"),
    (856, "instruction that is a number", rows({"instruction": 5, "output": "b"}), "refused"),
    (857, "odd history", rows({"instruction": "a", "output": "b", "history": [["x"], 5]}), "refused"),
    (858, "preferences", rows({"prompt": "a", "chosen": "b", "rejected": "c"}), "refused"),
    (859, "labels", rows({"prompt": "a", "completion": "b", "label": True}), "refused"),
    (860, "empty completion", rows({"prompt": "a", "completion": ""}), "refused"),
    (861, "empty text", rows({"text": ""}), "refused"),
    (864, "prompt longer than a sequence", chat({"role": "user", "content": "ab" * 200}, ASSISTANT), "refused"),
    (865, "special tokens in content", chat({"role": "user", "content": "<|end|><|assistant|>x"}, ASSISTANT), "either"),
    (869, "1 MB of spaces between lines", lines(20) + (" " * 1000 + "\n") * 1000 + lines(20), "either"),
)
# The same for contents that are large.
LARGE: tuple[tuple[int, str, Callable[[], str | bytes], Outcome], ...] = (
    (791, "text of 10 MB in a line", lambda: json.dumps({"text": "ab " * (3 * MB)}) + "\n", "either"),
    (
        792,
        "turn of 100 MB",
        lambda: chat({"role": "user", "content": "ab" * (50 * MB)}, ASSISTANT)[: 101 * MB] + "\n",
        "refused",
    ),
    (793, "100 MB of brackets", lambda: b"[" * (100 * MB), "refused"),
    (794, "100,000 messages in a row", lambda: rows({"messages": [USER, ASSISTANT] * 50_000}, 1), "either"),
)


def named(file: str, content: str | bytes | Callable[[], str | bytes]) -> tuple[Edit, ...]:
    """A data file of another name than data.jsonl, whose name is that of the config's set."""
    write = made(file, content) if callable(content) else text(file, content)
    return write, chosen(file)


def chosen(path: str) -> Edit:
    """Makes the config name this data."""
    return text("r.toml", CONFIG.replace('"data.jsonl"', json.dumps(path)))


def archived(pack: Callable[[bytes], bytes]) -> Callable[[], bytes]:
    return lambda: pack(lines().encode())


def many_files(folder: Path) -> None:
    (folder / "d").mkdir()
    for number in range(20_000):
        (folder / f"d/{number}.jsonl").write_text(lines(1))


def split_folder(name: str) -> tuple[Edit, ...]:
    """A folder in the format of `datasets`, whose split is named."""
    return text("d/dataset_dict.json", json.dumps({"splits": [name]})), chosen("d")


# Number, name, edits, outcome, and what a refusal names.
FILES: tuple[tuple[int, str, tuple[Edit, ...], Outcome, str], ...] = (
    (781, "half a character in CSV", named("d.csv", b"prompt,completion\na,\xed\xa0\x80\n" * 3), "refused", "d.csv"),
    (795, "100 MB in a small gzip file", named("d.gz", lambda: gzip.compress(b"\n" * (100 * MB))), "refused", "d.gz"),
    (796, "gzip by another name", (made(FILE, archived(gzip.compress)),), "refused", FILE),
    (797, "Zstandard by another name", (text(FILE, b"\x28\xb5\x2f\xfd\x04\x00" + bytes(100)),), "refused", FILE),
    (798, "bzip2 by another name", (made(FILE, archived(bz2.compress)),), "refused", FILE),
    (799, "zip by another name", (made(FILE, zipped),), "refused", FILE),
    (800, "pickle by another name", (text(FILE, PICKLE),), "refused", FILE),
    (801, "12 GiB of JSON lines", (sparse(FILE),), "refused", FILE),
    (802, "12 GiB of text", (sparse("d.txt"), chosen("d.txt")), "refused", "d.txt"),
    (803, "12 GiB of a JSON list", (sparse("d.json"), chosen("d.json")), "refused", "d.json"),
    (804, "12 GiB of CSV", (sparse("d.csv"), chosen("d.csv")), "refused", "d.csv"),
    (805, "a pipe", (fifo(FILE),), "refused", FILE),
    (806, "a link to a device", (link(FILE, "/dev/zero"),), "refused", FILE),
    (807, "a link to itself", (link(FILE, FILE),), "refused", FILE),
    (808, "folder that links to itself", (link("d/a", "."), link("d/b", "../d"), chosen("d")), "either", "d"),
    (809, "folder with a pipe", (text("d/a.jsonl", lines()), fifo("d/b.jsonl"), chosen("d")), "refused", "b.jsonl"),
    (
        810,
        "folder with a link outside",
        (text("d/a.jsonl", lines()), link("d/b", "../../outside"), chosen("d")),
        "either",
        "d",
    ),
    (811, "folder of 20,000 files", (many_files, chosen("d")), "either", "d"),
    (812, "folder without files", (directory("d"), chosen("d")), "refused", "d"),
    (
        813,
        "folder with odd names",
        (text("d/a b.jsonl", lines()), text("d/-x\n.jsonl", lines()), chosen("d")),
        "either",
        "d",
    ),
    (814, "folder with a name that is not UTF-8", (text("d/\udcff.jsonl", lines()), chosen("d")), "either", "d"),
    (
        815,
        "state.json with files outside",
        (text("d/state.json", '{"_data_files": [{"filename": "../../outside/secret.txt"}]}'), chosen("d")),
        "refused",
        "d",
    ),
    (816, "split outside", split_folder("../../outside"), "refused", "d"),
    (817, "split that links outside", (link("d/train", "../../outside/folder"), chosen("d")), "either", "d"),
    (818, "pattern without files", (chosen("nosuch*.jsonl"),), "refused", "nosuch*.jsonl"),
    (819, "pattern of folders", (chosen("**/"),), "refused", ""),
    (820, "open bracket in a pattern", (chosen("[.jsonl"),), "refused", "[.jsonl"),
    (821, "events of a run", (chosen("runs/x/events.jsonl"),), "refused", "events.jsonl"),
    (822, "a file of the system", (chosen("/etc/passwd"),), "refused", "/etc/passwd"),
    (823, "name of 5,000 characters", (chosen("x" * 5000),), "refused", "x"),
    (824, "a model", (chosen("model"),), "refused", "model"),
    (825, "CSV with an open quote", named("d.csv", 'text\n"a\n' + "b\n" * 40), "refused", "d.csv"),
    (826, "CSV with a column twice", named("d.csv", "text,text\na,b\n" * 40), "refused", "d.csv"),
    (827, "CSV with longer rows", named("d.csv", "text\n" + "a,b,c\n" * 40), "refused", "d.csv"),
    (828, "CSV with semicolons", named("d.csv", "prompt;completion\n" + "a;b\n" * 40), "refused", "d.csv"),
    (829, "CSV without rows", named("d.csv", "text\n"), "refused", "d.csv"),
    (830, "CSV with a null character", named("d.csv", "text\n" + "a\0b\n" * 40), "either", "d.csv"),
    (831, "CSV with CR", named("d.csv", "text\r" + "ab\r" * 40), "either", "d.csv"),
    (
        832,
        "CSV of 100,000 columns",
        named("d.csv", lambda: ",".join(f"c{i}" for i in range(100_000)) + "\na\n"),
        "refused",
        "d.csv",
    ),
    (870, "text after a JSON list", named("d.json", "[" + json.dumps(GOOD) + "] x"), "refused", "d.json"),
    (871, "JSON list of text", named("d.json", '["a", "b"]'), "refused", "d.json"),
    (872, "one JSON object", named("d.json", json.dumps(GOOD, indent=2)), "refused", "d.json"),
    (873, "unknown suffix", named("d.exe", b"MZ" + bytes(range(256))), "refused", "d.exe"),
)
LONG = chat(USER, {"role": "assistant", "content": "ab" * 200})
OVERRIDES: tuple[tuple[int, str, tuple[str, ...], str, Outcome, str], ...] = (
    (
        862,
        "long rows that are errors",
        ("data.overlong=error",),
        LONG,
        "refused",
        "data.max_length",
    ),
    (
        863,
        "long rows that are all dropped",
        ("data.overlong=drop",),
        LONG,
        "refused",
        "data.max_length",
    ),
    (866, "another format", ("data.train.0.format=alpaca",), lines(), "refused", "instruction"),
    (867, "unknown format", ("data.train.0.format=nosuch",), lines(), "refused", "data.train.0.format"),
    (868, "sequences of two tokens", ("data.max_length=2",), lines(), "either", "data.max_length"),
    (750, "half of the rows for validation", ("data.val_size=0.5",), lines(), "either", "data.val_size"),
    (751, "validation set that is missing", ('data.val=[{path="nope"}]',), lines(), "refused", "nope"),
    (752, "questions of another model", ("eval.questions=3",), lines(), "either", "eval.questions"),
)
HOSTILE = chat(
    {"role": "user", "content": "\x1b[31m\u202e\x9b2J\r\n\0"}, {"role": "assistant", "content": "[bold]b[/bold]"}
)


# Tables of Arrow and Parquet


def bytes_of(write: Callable[[Any, Any], object], table: Any) -> bytes:
    buffer = io.BytesIO()
    write(table, buffer)
    return buffer.getvalue()


def arrow(table: Any, stream: Any) -> None:
    import pyarrow

    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


def parquet(table: Any, stream: Any) -> None:
    from pyarrow import parquet

    parquet.write_table(table, stream)


def texts(count: int = 40) -> Any:
    import pyarrow

    return pyarrow.table({"text": [f"text {number}" for number in range(count)]})


def repeated() -> Any:
    """1,000 rows of one text of 6 MB, which is stored once."""
    import pyarrow

    dictionary = pyarrow.array(["ab " * 2_000_000])
    return pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000), dictionary)})


def twice() -> Any:
    import pyarrow

    return pyarrow.Table.from_arrays([pyarrow.array(["a"] * 40)] * 2, names=["text", "text"])


def damaged(data: bytes, place: float, length: int) -> bytes:
    """Other bytes in place of some, at a fraction of the file."""
    start = int(len(data) * place)
    return data[:start] + b"\xff" * length + data[start + length :]


TABLES: tuple[tuple[int, str, str, Callable[[], bytes], Outcome], ...] = (
    (876, "Parquet cut short", "d.parquet", lambda: bytes_of(parquet, texts())[:-20], "refused"),
    (877, "Parquet with a damaged end", "d.parquet", lambda: damaged(bytes_of(parquet, texts()), 0.7, 100), "refused"),
    (
        878,
        "Parquet with damaged pages",
        "d.parquet",
        lambda: damaged(bytes_of(parquet, texts(4000)), 0.05, 2000),
        "refused",
    ),
    (879, "Parquet that repeats a text of 6 MB", "d.parquet", lambda: bytes_of(parquet, repeated()), "refused"),
    (880, "Arrow that repeats a text of 6 MB", "d.arrow", lambda: bytes_of(arrow, repeated()), "refused"),
    (881, "Arrow cut short", "d.arrow", lambda: bytes_of(arrow, texts())[:-200], "refused"),
    (882, "Arrow with damaged offsets", "d.arrow", lambda: damaged(bytes_of(arrow, texts()), 0.45, 64), "refused"),
    (883, "Arrow of bytes", "d.arrow", lambda: bytes(range(256)) * 9, "refused"),
    (884, "Arrow without rows", "d.arrow", lambda: bytes_of(arrow, texts(0)), "refused"),
    (885, "Parquet without rows", "d.parquet", lambda: bytes_of(parquet, texts(0)), "refused"),
    (886, "Arrow with a column twice", "d.arrow", lambda: bytes_of(arrow, twice()), "refused"),
)


def cases() -> Iterator[Case]:
    for number, name, content, expected in JSONL:
        yield Case(number, AREA, name, TRAIN, expected, (text(FILE, content),), "data")
    for number, name, content, expected in LARGE:
        yield Case(number, AREA, name, TRAIN, expected, (made(FILE, content),), FILE)
    for number, name, edits, expected, shown in FILES:
        yield Case(number, AREA, name, TRAIN, expected, edits, shown)
    for number, name, overrides, content, expected, shown in OVERRIDES:
        yield Case(number, AREA, name, (*TRAIN, *overrides), expected, (text(FILE, content),), shown)
    for number, name, file, content, expected in TABLES:
        yield Case(number, AREA, name, TRAIN, expected, named(file, content), file)
    for number, shown in ((874, "3"), (875, "1000000")):
        edits = (text(FILE, HOSTILE),)
        yield Case(number, AREA, f"samples shown: {shown}", (*PLAN, "--show-data", shown), "either", edits)
