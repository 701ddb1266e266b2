"""Any text of a config, rows of data, header of safetensors or line of events gives a result or a UserError."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rptrain.config.resolve import resolve
from rptrain.config.schema import keys
from rptrain.data import formats
from rptrain.models.weights import safetensors_io
from rptrain.runs.records import events
from rptrain.utils.errors import UserError

QUICK, MANY = 40, 2000  # examples of each kind

CONFIG = b"""\
[model]
path = "x"
[[data.train]]
path = "rows.jsonl"
[train]
max_steps = 6
[optim]
betas = [0.9, 0.95]
"""
ROW: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
}
KINDS = sorted(events.EVENTS)

numbers = st.integers() | st.floats() | st.sampled_from([2**63, 10**30, -1, 0, 1e308])
words = st.text(max_size=20) | st.sampled_from(
    ["\0", "\ud800", "../x", "9" * 5000, "x" * 3000, "~nobody/x", "\x1b[31m"]
)
leaves = st.none() | st.booleans() | numbers | words
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """JSON data in which a value, or a key, is another."""
    tree = json.loads(json.dumps(good))
    node, key = tree, None
    parent: Any = None
    while isinstance(node, dict | list) and node and (parent is None or draw(st.booleans())):
        parent, key = node, draw(st.sampled_from([*node] if isinstance(node, dict) else [*range(len(node))]))
        node = parent[key]
    if isinstance(parent, dict) and draw(st.booleans()):
        parent[draw(words)] = parent.pop(key)
    else:
        parent[key] = draw(trees)
    return tree


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """The text with a piece cut out or put in."""
    start, stop = sorted(draw(st.integers(0, len(good))) for _ in range(2))
    piece = draw(st.binary(max_size=8) | st.sampled_from([b"[" * 2000, b'{"a":' * 2000, b'"', b"nan", b"1e999", b"="]))
    return good[:start] + piece + good[draw(st.sampled_from([start, stop])) :]


def json_of(good: Any) -> st.SearchStrategy[bytes]:
    return changed(good).map(dumped) | damaged(dumped(good)) | trees.map(dumped) | st.binary(max_size=60)


def result_or_refusal(function: Callable[[], object]) -> None:
    try:
        function()
    except UserError as error:
        assert str(error).strip()


def of_file(data: bytes, suffix: str, function: Callable[[Path], object]) -> None:
    with NamedTemporaryFile(suffix=suffix) as file:
        file.write(data)
        file.flush()
        result_or_refusal(lambda: function(Path(file.name)))


def config(data: bytes) -> None:
    of_file(data, ".toml", resolve)


def override(key: str, value: str) -> None:
    of_file(CONFIG, ".toml", lambda path: resolve(path, [f"{key}={value}"]))


def rows(data: bytes, suffix: str) -> None:
    def read(path: Path) -> None:
        tally = formats.Tally()
        list(formats.read(path, formats.AUTO, tally))
        tally.judge(0.01)

    of_file(data, suffix, read)


def header(data: bytes, more: int) -> None:
    length = max(0, len(data) + more)
    of_file(length.to_bytes(8, "little") + data + bytes(14), ".safetensors", safetensors_io.read_header)


def event(data: bytes) -> None:
    result_or_refusal(lambda: events.from_line(data))


PARTS: dict[str, tuple[Callable[..., None], dict[str, st.SearchStrategy[Any]]]] = {
    "config": (config, {"data": damaged(CONFIG) | st.binary(max_size=60)}),
    "override": (override, {"key": st.sampled_from(sorted(keys())) | words, "value": words | trees.map(json.dumps)}),
    "rows": (rows, {"data": json_of(ROW) | json_of([ROW]), "suffix": st.sampled_from([".jsonl", ".json", ".csv"])}),
    "header": (header, {"data": json_of(HEADER), "more": st.integers(-2, 2) | st.sampled_from([2**62, 10**6])}),
    "event": (
        event,
        {"data": st.sampled_from(KINDS).flatmap(lambda kind: json_of({"schema": 1, "event": kind, "step": 1}))},
    ),
}


def fuzz(part: str, count: int) -> None:
    """The same examples in every run, without a file of earlier failures."""
    function, strategies = PARTS[part]
    same = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    same(given(**strategies)(function))()


@pytest.mark.parametrize("part", PARTS)
def test_some_inputs(part) -> None:
    fuzz(part, QUICK)


@pytest.mark.grid
@pytest.mark.parametrize("part", PARTS)
def test_thousands_of_inputs(part) -> None:
    fuzz(part, MANY)
