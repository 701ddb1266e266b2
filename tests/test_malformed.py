"""Two hundred malformed inputs, drawn from seeds: each ends in a clear error, or is taken where it has a meaning."""

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from rptrain.checkpoint import adapter
from rptrain.checkpoint.adapter import settings_of
from rptrain.checkpoint.adapter_config import content, make
from rptrain.checkpoint.atomic_dir import read_manifest
from rptrain.config.resolve import resolve
from rptrain.data import formats
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.models.weights import pretrained, safetensors_io
from rptrain.utils.errors import UserError

from . import run_tools as tools

HOSTILE: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        10**30,
        1e308,
        float("nan"),
        "",
        "\ud800",
        "../../../etc/passwd",
        "/etc/passwd",
        "\0",
        "x" * 9999,
    ),
    *([], {}, [[]], {"a": {}}, [1, "a", None], {"../x": "../y"}, "*", "9" * 5000),
]
BROKEN = [b"\0", b"\xff\xfe", b"[" * 3000, b"{" * 3000, b'"', b"=", b"9" * 5000, b"\xc3", b"}", b"\r", b"1e999", b"nan"]


def broken_bytes(good: bytes, random: Random) -> bytes:
    place, end = sorted(random.randrange(len(good) + 1) for _ in range(2))
    kind = random.randrange(4)
    if kind == 0:
        return good[:place]
    if kind == 1:
        return good[:place] + good[end:]
    if kind == 2:
        return good[:place] + random.choice(BROKEN) + good[place:]
    return good[:place] + random.randbytes(random.randrange(1, 9)) + good[place:]


def broken_json(good: Any, random: Random) -> bytes:
    """One value of it, or one key, is another."""
    tree, node = json.loads(json.dumps(good)), None
    inner: Any = tree
    while isinstance(inner, dict | list) and inner and (node is None or random.random() < 0.8):
        node, key = inner, random.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = node[key]
    assert node is not None
    if isinstance(node, dict) and random.random() < 0.3:
        node[random.choice(["", "../a", "a\0b", "unknown"])] = node.pop(key)
    else:
        node[key] = random.choice(HOSTILE)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def either(good: Any, random: Random) -> bytes:
    return broken_json(good, random) if random.random() < 0.6 else broken_bytes(json.dumps(good).encode(), random)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make()  # imports PEFT, which opens files of its own
    return tools.write_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def inside(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `model`; nothing that is opened by name lies outside of it."""
    shutil.copytree(base, tmp_path / "model")
    folder = tmp_path.resolve()
    opened = builtins.open

    def checked(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = Path(os.fsdecode(path)).resolve()
            assert folder in (name, *name.parents) or name.suffix in (".py", ".pyc"), f"{name} was opened"

    open_descriptor = os.open

    def by_descriptor(path: Any, *rest: Any, **named: Any) -> Any:
        checked(path)
        return open_descriptor(path, *rest, **named)

    def by_file(path: Any, *rest: Any, **named: Any) -> Any:
        checked(path)
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", by_descriptor)
    monkeypatch.setattr(builtins, "open", by_file)
    monkeypatch.setattr("io.open", by_file)
    return tmp_path


def refused_or_taken(function: Callable[[], object]) -> bool:
    """Whether it is refused, with a message that a person can read."""
    try:
        function()
    except UserError as error:
        assert str(error).strip() and "Traceback" not in str(error)
        return True
    return False


def read_all(file: Path) -> None:
    tally = formats.Tally()
    list(formats.read(file, formats.AUTO, tally))
    tally.judge(0.01)


def test_configs(inside):
    good = tools.CONFIG.format(folder=inside).encode()
    file = inside / "run.toml"
    refused = 0
    for seed in range(60):
        random = Random(seed)
        file.write_bytes(broken_bytes(good, random))
        refused += refused_or_taken(lambda: resolve(file))
    for seed in range(20):
        random = Random(seed)
        file.write_bytes(good)
        key = random.choice(
            ["train.max_steps", "engine.devices", "data.train.0.path", "engine", "optim.betas", "lora.r"]
        )
        value = random.choice([*map(str, HOSTILE), "[" * 5000, "9" * 5000, "{a", "1e999", "'", "\ud800"])
        refused += refused_or_taken(lambda key=key, value=value: resolve(file, [f"{key}={value}"]))
    assert refused > 50


def test_data(inside):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    refused = 0
    for seed in range(40):
        random = Random(seed)
        listed = seed % 2 == 0
        good: Any = rows if listed else rows[0]
        file = inside / ("rows.json" if listed else "rows.jsonl")
        file.write_bytes(either(good, random) + (b"" if listed else b"\n" + json.dumps(rows[0]).encode()))
        refused += refused_or_taken(lambda file=file: read_all(file))
    assert refused > 25


def test_headers_of_safetensors(inside):
    whole = (inside / "model/model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    file = inside / "model.safetensors"
    refused = 0
    for seed in range(40):
        random = Random(seed)
        encoded = either(header, random)
        stated = random.choice([len(encoded), len(encoded), len(encoded), 0, 2**63, len(encoded) + 10**6])
        file.write_bytes(stated.to_bytes(8, "little") + encoded + rest)
        refused += refused_or_taken(lambda: safetensors_io.read_header(file))
    assert refused > 30


def test_indexes(inside):
    spec = registry.build(read_config(inside / "model"))
    (inside / "model/model.safetensors").rename(inside / "model/model-1.safetensors")
    names = safetensors_io.read_header(inside / "model/model-1.safetensors")
    good = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    index = inside / "model" / pretrained.INDEX
    refused = 0
    for seed in range(25):
        index.write_bytes(either(good, Random(seed)))
        refused += refused_or_taken(lambda: pretrained.check(inside / "model", spec))
    assert refused > 10


def test_adapters_and_manifests(inside):
    spec = registry.build(read_config(inside / "model"))
    made = adapter.Adapter(LoRA(r=2, lora_alpha=4), "model")
    tuned = with_lora(spec, made.settings)
    shapes = {adapter.PREFIX + name: shape for name, shape in adapter.shapes(tuned).items()}
    folder = inside / "adapter"
    folder.mkdir()
    entries = {name: (shape, torch.float32) for name, shape in shapes.items()}
    safetensors_io.write(folder / adapter.WEIGHTS, entries, map(torch.zeros, shapes.values()))
    for seed in range(25):
        (folder / adapter.CONFIG).write_bytes(either(content(made.config(tuned)), Random(seed)))
        refused_or_taken(lambda: settings_of(adapter.read(folder), spec))
    good = {"format": 1, "files": {"a": {"size": 1, "sha256": "0"}}}
    for seed in range(25):
        (folder / "complete.json").write_bytes(either(good, Random(seed)))
        refused_or_taken(lambda: read_manifest(folder))


def test_a_pipe_that_nobody_writes_to(tmp_path):
    os.mkfifo(tmp_path / "run.toml")
    result = tools.invoke("--config", tmp_path / "run.toml")
    assert result.exit_code == 2 and "is not a regular file" in result.stderr


def test_an_index_that_points_outside(inside):
    spec = registry.build(read_config(inside / "model"))
    (inside / "model/model.safetensors").rename(inside / "outside.safetensors")
    for name in ("../outside.safetensors", str(inside / "outside.safetensors"), "a/../../outside.safetensors"):
        (inside / "model" / pretrained.INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(UserError, match="points outside its directory"):
            pretrained.check(inside / "model", spec)
