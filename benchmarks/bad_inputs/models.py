"""Configs and weights of models."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.case import GENERATE, PLAN, TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import (
    PICKLE,
    cut,
    deleted,
    fifo,
    joined_tensors,
    link,
    moved,
    replaced,
    sparse,
    split_tensors,
    tensors,
    text,
    values,
)

AREA = "models"
CONFIG, WEIGHTS, INDEX = "model/config.json", "model/model.safetensors", "model/model.safetensors.index.json"
RANDOM = (*TRAIN, "model.init=random")
SMALL = (*RANDOM, "engine.host_limit=1GiB")
NAN = float("nan")


def rope(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"} | parameters}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
# Number, name, keys of config.json, command, outcome; a refusal names the first key.
KEYS: tuple[tuple[int, str, dict[str, Any], tuple[str, ...], Outcome], ...] = (
    (554, "no hidden size", {"hidden_size": 0}, PLAN, "refused"),
    (555, "negative hidden size", {"hidden_size": -1}, PLAN, "refused"),
    (556, "hidden size of 10**12", {"hidden_size": 10**12}, PLAN, "refused"),
    (557, "hidden size of text", {"hidden_size": "16"}, PLAN, "refused"),
    (558, "hidden size in a list", {"hidden_size": [16]}, PLAN, "refused"),
    (559, "hidden size that is not whole", {"hidden_size": 16.0}, PLAN, "refused"),
    (560, "hidden size of true", {"hidden_size": True}, PLAN, "refused"),
    (561, "undefined hidden size", {"hidden_size": NAN}, PLAN, "refused"),
    (562, "million layers", {"num_hidden_layers": 1_000_000}, PLAN, "refused"),
    (563, "no heads", {"num_attention_heads": 0}, PLAN, "refused"),
    (564, "heads that are not divided", {"num_key_value_heads": 3}, PLAN, "refused"),
    (565, "more heads of keys than of queries", {"num_key_value_heads": 8}, PLAN, "refused"),
    (566, "odd head", {"head_dim": 7}, PLAN, "refused"),
    (567, "head of null", {"head_dim": None}, PLAN, "either"),
    (568, "vocabulary of text", {"vocab_size": "105"}, TRAIN, "refused"),
    (569, "negative vocabulary", {"vocab_size": -5}, PLAN, "refused"),
    (570, "vocabulary of 10", {"vocab_size": 10}, TRAIN, "either"),
    (571, "undefined epsilon", {"rms_norm_eps": NAN}, PLAN, "refused"),
    (572, "negative epsilon", {"rms_norm_eps": -1}, PLAN, "refused"),
    (573, "infinite epsilon", {"rms_norm_eps": float("inf")}, PLAN, "refused"),
    (574, "tied as text", {"tie_word_embeddings": "yes"}, PLAN, "refused"),
    (575, "not tied", {"tie_word_embeddings": False}, PLAN, "either"),
    (576, "unknown architecture", {"architectures": ["GPT2LMHeadModel"]}, PLAN, "refused"),
    (577, "no architecture", {"architectures": None, "model_type": None}, PLAN, "refused"),
    (578, "architecture that is a table", {"architectures": {"a": 1}}, PLAN, "refused"),
    (579, "architecture with an escape sequence", {"architectures": ["\x1b[31mred\x07"]}, TRAIN, "refused"),
    (580, "architecture of 5,000 characters", {"architectures": ["x" * 5000]}, PLAN, "refused"),
    (581, "rotation of text", {"rope_parameters": "x"}, PLAN, "refused"),
    (582, "theta of zero", rope(rope_theta=0), PLAN, "refused"),
    (583, "theta of text", rope(rope_theta="x"), PLAN, "refused"),
    (584, "unknown rotation", rope(rope_type="nosuch"), PLAN, "refused"),
    (585, "rotation in a list", rope(rope_type=["default"]), PLAN, "refused"),
    (586, "rotation of Llama 3 without its keys", rope(rope_type="llama3"), PLAN, "refused"),
    (587, "negative factor", rope(**YARN | {"factor": -1}), PLAN, "refused"),
    (588, "tiny original length", rope(**YARN | {"original_max_position_embeddings": 1}), PLAN, "either"),
    (589, "partial rotation", rope(partial_rotary_factor=0.5), PLAN, "refused"),
    (590, "quantized", {"quantization_config": {"quant_method": "gptq"}}, PLAN, "refused"),
    (591, "another activation", {"hidden_act": "gelu"}, PLAN, "refused"),
    (592, "activation in a list", {"hidden_act": ["silu"]}, PLAN, "refused"),
    (593, "biases", {"attention_bias": True}, PLAN, "refused"),
    (594, "sliding window", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, PLAN, "either"),
    (595, "unknown kinds of layers", {"layer_types": ["x", "y", "z"]}, PLAN, "either"),
    (596, "code in the hub's format", {"auto_map": {"AutoModelForCausalLM": "m.X"}}, PLAN, "either"),
    (
        597,
        "code for this architecture",
        {"auto_map": {"AutoConfig": "m.X"}, "architectures": ["Qwen3ForCausalLM"]},
        PLAN,
        "either",
    ),
    (598, "theta of 1e38", rope(rope_theta=1e38), TRAIN, "either"),
    (599, "theta of 1e-38", rope(rope_theta=1e-38), TRAIN, "either"),
    (600, "epsilon of 1e38", {"rms_norm_eps": 1e38}, TRAIN, "diverged"),
    (601, "odd YaRN", rope(**YARN | {"factor": 1.5, "beta_fast": 1, "beta_slow": 32}), TRAIN, "either"),
    (602, "YaRN with factors of attention", rope(**YARN | {"mscale": 2.0, "mscale_all_dim": -1.0}), TRAIN, "either"),
    (603, "not tied, without a head", {"tie_word_embeddings": False}, TRAIN, "refused"),
    (604, "vocabulary larger than the weights", {"vocab_size": 106}, TRAIN, "refused"),
    (605, "vocabulary smaller than the tokenizer's", {"vocab_size": 100}, RANDOM, "either"),
    (606, "vocabulary of 16 million", {"vocab_size": 16_000_000}, SMALL, "refused"),
    (607, "300 layers", {"num_hidden_layers": 300}, RANDOM, "either"),
    (608, "hidden size of 2**20", {"hidden_size": 2**20}, SMALL, "refused"),
    (609, "hidden size of 2**20", {"hidden_size": 2**20}, PLAN, "refused"),
    (610, "end token that is a table", {"eos_token_id": {"a": 1}}, GENERATE, "either"),
    (611, "end tokens in lists", {"eos_token_id": [[2]]}, GENERATE, "either"),
    (612, "end token of text", {"eos_token_id": "x"}, GENERATE, "either"),
    (613, "end token of 10**18", {"eos_token_id": 10**18}, GENERATE, "either"),
    (614, "negative end token", {"eos_token_id": -7}, GENERATE, "either"),
    (615, "end tokens that are tables", {"eos_token_id": [{"a": 1}]}, GENERATE, "either"),
    (616, "undefined end token", {"eos_token_id": NAN}, GENERATE, "either"),
    (617, "unknown dtype", {"dtype": "int8"}, GENERATE, "refused"),
    (618, "dtype in a list", {"dtype": ["float32"]}, GENERATE, "refused"),
    (619, "positions of text", {"max_position_embeddings": "x"}, GENERATE, "either"),
)
# Number, name, content of config.json, outcome when a run is planned.
CONTENTS: tuple[tuple[int, str, str | bytes, Outcome], ...] = (
    (620, "empty", "", "refused"),
    (621, "a list", "[]", "refused"),
    (622, "null characters", b"\0" * 20, "refused"),
    (623, "UTF-16", '{"a": 1}'.encode("utf-16"), "refused"),
    (624, "byte order mark", b'\xef\xbb\xbf{"a": 1}', "either"),
    (625, "deep", "[" * 100_000, "refused"),
    (626, "number of 10,000 digits", '{"hidden_size": ' + "9" * 10_000 + "}", "refused"),
)
Tensors = dict[str, Any]
NORM = "model.norm.weight"


def one(change: Callable[[Tensors], object]) -> Edit:
    """Changes the description of one tensor in the header."""
    return header(lambda header: change(header[NORM]))


def filled(value: bytes) -> Edit:
    """Sets every number of the weights."""
    return tensors(WEIGHTS, lambda header, data: (header, value * (len(data) // len(value))))


def header(change: Callable[[Tensors], object]) -> Edit:
    def edit(header: Tensors, data: bytes) -> None:
        change(header)

    return tensors(WEIGHTS, edit)


def raw_header(encoded: Callable[[Tensors], bytes]) -> Edit:
    """Replaces the text of the header."""

    def edit(folder: Path) -> None:
        found, data = split_tensors((folder / WEIGHTS).read_bytes())
        (folder / WEIGHTS).write_bytes(joined_tensors(encoded(found), data))

    return edit


def extra(name: str) -> Edit:
    """One tensor more, with its bytes."""

    def change(header: Tensors, data: bytes) -> tuple[Tensors, bytes]:
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        return header, data + bytes(4)

    return tensors(WEIGHTS, change)


def twice(found: Tensors) -> bytes:
    """The header with one name twice."""
    whole = json.dumps(found)
    return (whole[:-1] + f', "{NORM}": {json.dumps(found[NORM])}}}').encode()


def shorter(header: Tensors, data: bytes) -> tuple[Tensors, bytes]:
    """Without the last tensor."""
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    return header, data[: header.pop(last)["data_offsets"][0]]


def length(nbytes: int) -> Edit:
    """Another length of the header."""

    def edit(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(nbytes.to_bytes(8, "little") + data[8:])

    return edit


def million(folder: Path) -> None:
    names = {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(1_000_000)}
    (folder / WEIGHTS).write_bytes(joined_tensors(names, b""))


SAFETENSORS: tuple[tuple[int, str, Edit, tuple[str, ...], Outcome], ...] = (
    (631, "header of 2**63 bytes", length(2**63), TRAIN, "refused"),
    (632, "header of 2**64 - 1 bytes", length(2**64 - 1), GENERATE, "refused"),
    (633, "empty", text(WEIGHTS, b""), TRAIN, "refused"),
    (634, "cut short", cut(WEIGHTS, -1000), TRAIN, "refused"),
    (635, "a page of the web", text(WEIGHTS, "<!doctype html><html>404</html>"), TRAIN, "refused"),
    (
        636,
        "a pointer of Git LFS",
        text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        TRAIN,
        "refused",
    ),
    (637, "overlapping tensors", one(lambda tensor: tensor.update(data_offsets=[0, 64])), TRAIN, "refused"),
    (638, "negative offset", one(lambda tensor: tensor.update(data_offsets=[-64, 0])), TRAIN, "refused"),
    (639, "offsets that are not whole", one(lambda tensor: tensor.update(data_offsets=[0.0, 64.0])), TRAIN, "refused"),
    (640, "unknown dtype", one(lambda tensor: tensor.update(dtype="X9")), TRAIN, "refused"),
    (641, "dtype of another size", one(lambda tensor: tensor.update(dtype="F16")), TRAIN, "refused"),
    (642, "dtype in a list", one(lambda tensor: tensor.update(dtype=["F32"])), TRAIN, "refused"),
    (643, "another shape", one(lambda tensor: tensor.update(shape=[4, 4])), TRAIN, "refused"),
    (644, "negative shape", one(lambda tensor: tensor.update(shape=[-16])), TRAIN, "refused"),
    (645, "shape of 10**30", one(lambda tensor: tensor.update(shape=[10**30])), TRAIN, "refused"),
    (646, "shape of true", one(lambda tensor: tensor.update(shape=[True])), TRAIN, "refused"),
    (647, "a tensor missing", tensors(WEIGHTS, shorter), TRAIN, "refused"),
    (648, "a tensor too many", extra("model.extra.weight"), TRAIN, "refused"),
    (649, "a tensor named with an escape sequence", extra("\x1b[31mred\x07"), TRAIN, "refused"),
    (
        650,
        "bytes after the last tensor",
        lambda folder: (folder / WEIGHTS).open("ab").write(b"x" * 100),
        TRAIN,
        "refused",
    ),
    (651, "undefined numbers", filled(b"\xff\xff\xff\xff"), TRAIN, "refused"),
    (652, "infinite numbers", filled(b"\x00\x00\x80\x7f"), TRAIN, "refused"),
    (653, "a name twice", raw_header(twice), TRAIN, "refused"),
    (654, "header that is not UTF-8", raw_header(lambda found: b'{"\xff": 1}'), TRAIN, "refused"),
    (655, "header that is a list", raw_header(lambda found: b"[]"), TRAIN, "refused"),
    (656, "deep header", raw_header(lambda found: b"[" * 100_000), TRAIN, "refused"),
    (
        657,
        "metadata of other types",
        header(lambda found: found.update(__metadata__={"format": "\x1b[31m"})),
        TRAIN,
        "either",
    ),
    (
        658,
        "90 MB of spaces in the header",
        raw_header(lambda found: json.dumps(found).encode() + b" " * 90_000_000),
        TRAIN,
        "either",
    ),
    (659, "million tensors", million, TRAIN, "refused"),
    (905, "numbers of 1e38", filled(b"\x99\x76\x96\x7e"), TRAIN, "either"),
    (906, "numbers of 1e38, generating", filled(b"\x99\x76\x96\x7e"), GENERATE, "either"),
    (907, "numbers of 1e38, sampling", filled(b"\x99\x76\x96\x7e"), (*GENERATE, "--temperature", "1"), "either"),
)


def index(content: object) -> tuple[Edit, ...]:
    """An index with this content, and the weights under the name of a shard."""
    return moved(WEIGHTS, "model/model-1.safetensors"), text(
        INDEX, content if isinstance(content, bytes) else json.dumps(content)
    )


def mapped(file: object) -> tuple[Edit, ...]:
    """An index that has every tensor in one file."""

    def edit(folder: Path) -> None:
        found, _ = split_tensors((folder / WEIGHTS).read_bytes())
        names = [name for name in found if name != "__metadata__"]
        for change in index({"metadata": {}, "weight_map": dict.fromkeys(names, file)}):
            change(folder)

    return (edit,)


INDEXES: tuple[tuple[int, str, tuple[Edit, ...], Outcome], ...] = (
    (660, "file outside", mapped("../../outside/secret.safetensors"), "refused"),
    (661, "absolute file", mapped("/etc/passwd"), "refused"),
    (662, "file outside by a folder", mapped("a/../../../outside/secret.safetensors"), "refused"),
    (663, "null character", mapped("a\0b"), "refused"),
    (664, "file without a name", mapped(""), "refused"),
    (665, "this folder", mapped("."), "refused"),
    (666, "file that is a number", mapped(5), "refused"),
    (667, "list", index([]), "refused"),
    (668, "no tensors", index({"weight_map": {}}), "refused"),
    (669, "broken", index(b"{]"), "refused"),
    (670, "another tensor", index({"weight_map": {"nosuch": "model-1.safetensors"}}), "either"),
    (671, "name of 5,000 characters", mapped("x" * 5000), "refused"),
    (
        672,
        "shard that links outside",
        (*mapped("s.safetensors"), link("model/s.safetensors", "../../outside/secret.safetensors")),
        "refused",
    ),
)


def cases() -> Iterator[Case]:
    for number, name, keys, args, expected in KEYS:
        does = {PLAN: "planning", GENERATE: "generating"}.get(args, "training")
        names = "model" if args is GENERATE else next(iter(keys))
        if names == "architectures":
            names = "architecture"
        if names == "rope_parameters" or number in (570, 595, 603, 604, *range(605, 610)):
            names = ""
        yield Case(number, AREA, f"{does}: {name}", args, expected, (values(CONFIG, keys),), names)
    for number, name, content, expected in CONTENTS:
        yield Case(number, AREA, f"config.json: {name}", PLAN, expected, (text(CONFIG, content),), "config.json")
    same = replaced(CONFIG, '"hidden_size"', '"hidden_size": 16, "hidden_size"')
    yield Case(627, AREA, "config.json: key twice", PLAN, edits=(same,), names="hidden_size")
    yield Case(628, AREA, "config.json: a pipe", PLAN, edits=(fifo(CONFIG),), names="config.json")
    yield Case(629, AREA, "config.json: 12 GiB", PLAN, edits=(sparse(CONFIG),), names="config.json")
    pipe = fifo("model/generation_config.json")
    yield Case(630, AREA, "generation_config.json: a pipe", TRAIN, "either", (pipe,))
    for number, name, edit, args, expected in SAFETENSORS:
        yield Case(number, AREA, f"weights: {name}", args, expected, (edit,), "model")
    for number, name, edits, expected in INDEXES:
        yield Case(number, AREA, f"index: {name}", TRAIN, expected, edits, "model")
    yield Case(673, AREA, "weights: a pipe", TRAIN, edits=(fifo(WEIGHTS),), names="model.safetensors")
    for number, name in ((674, "pytorch_model.bin"), (675, "model.pt"), (676, "consolidated.00.pth")):
        edits = (deleted(WEIGHTS), text(f"model/{name}", PICKLE))
        yield Case(number, AREA, f"pickled weights in {name}", TRAIN, edits=edits, names="safetensors")
    yield Case(677, AREA, "weights: pickled", GENERATE, edits=(text(WEIGHTS, PICKLE),), names="model.safetensors")
    code = (
        text("model/m.py", "import os\nos.system('touch hacked')\n"),
        values(
            CONFIG, {"auto_map": {"AutoConfig": "m.X", "AutoModelForCausalLM": "m.X", "AutoTokenizer": ["m.X", None]}}
        ),
        values("model/tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["m.X", None]}}),
    )
    yield Case(678, AREA, "code beside the weights", TRAIN, "either", code)
    file = (*TRAIN, "model.path=data.jsonl")
    yield Case(705, AREA, "model that is a file", file, names="data.jsonl")
    for number, name, target in ((706, "a link to nothing", "nope"), (707, "a link to itself", "zz")):
        yield Case(
            number, AREA, f"model that is {name}", (*TRAIN, "model.path=zz"), edits=(link("zz", target),), names="zz"
        )
    yield Case(749, AREA, "model that is this folder", (*TRAIN, "model.path=."), names="config.json")
    yield Case(754, AREA, "LICENSE of 2 GiB", TRAIN, "either", (sparse("model/LICENSE", 2 << 30),))
    secret = link("model/LICENSE", "../../outside/secret.txt")
    yield Case(755, AREA, "LICENSE that links outside", TRAIN, "either", (secret,))
