"""Measure how long `rptrain generate` takes to its first token, compared with another version.

python -m benchmarks.first_token OUT.json --before TREE [--folder DIR] [--size 8b] [--repeats 3]
    [--states cold "verified before"] [--placement auto]

Writes a Llama with random weights as an export, with the digests of its weights, and lets this source tree and TREE
(a checkout of another version) answer one token in turns: cold (its files are dropped from the page cache, and nothing
is known about them), read before (they are in the page cache), and verified before (and their digests are kept).
Records the seconds to the first output, and which share of the files was in the page cache at the start. Needs neither
a network nor root; `--folder` (default: a temporary one) must have space for the model, and keeps it.
"""

import argparse
import ctypes
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.commit import commit

ROOT = Path(__file__).resolve().parent.parent
SIZES = {  # hidden size, intermediate size, layers, heads, heads of keys and values, vocabulary
    "8b": (4096, 14336, 32, 32, 8, 128_256),
    "small": (512, 1536, 8, 8, 4, 32_000),
}
SHARDS = 4
PROMPT = "The first token"
COLD, _, KEPT = STATES = ("cold", "read before", "verified before")
EXPONENT = 121 << 7  # of a bfloat16: all weights are between 1/64 and 1/32, or their negatives
ONE = 127 << 7
SEAL = """
import sys
from pathlib import Path
from rptrain.checkpoint.atomic_dir import Aside
from rptrain.checkpoint.checked import WEIGHTS, hashed
from rptrain.models.families import registry
from rptrain.models.weights import pretrained
folder = Path(sys.argv[1])
files = pretrained.check(folder, registry.build(registry.model_config(folder)))
Aside(folder).seal({"kind": "export", WEIGHTS: hashed(files)})
"""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.first_token", description="Measure how long `rptrain generate` takes to its first token."
    )
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the JSON file to write")
    parser.add_argument("--before", type=Path, required=True, metavar="TREE", help="the checkout to compare with")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the model is written, or was")
    parser.add_argument("--size", choices=SIZES, default="8b", help="of the model (default: 8b)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each measurement (default: 3)")
    parser.add_argument("--states", choices=STATES, nargs="+", default=STATES, help="which to measure (default: all)")
    parser.add_argument("--placement", default="auto", help="of the model (default: auto)")
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        place = Path(name)
        trees = {"before": packaged(given.before, place / "before"), "now": packaged(ROOT, place / "now")}
        model = (given.folder or place) / f"llama-{given.size}"
        if not (model / "complete.json").exists():
            write_model(model, given.size)
            subprocess.run([sys.executable, "-P", "-c", SEAL, model], env=environment(trees["now"]), check=True)
        files = sorted(model.glob("*.safetensors"))
        for package in trees.values():  # compiles its modules, and kernels
            first_token(model, package, place / "first", given.placement)
        runs = list[dict[str, Any]]()
        for number in range(given.repeats):
            for state in given.states:
                for version, package in trees.items():
                    cache = place / (f"{version}-kept" if state == KEPT else f"{version}-{state}-{number}")
                    if state == KEPT and number == 0:
                        first_token(model, package, cache, given.placement)
                    for file in files:
                        drop(file) if state == COLD else read(file)
                    cached = round(sum(map(resident, files)) / sum(file.stat().st_size for file in files), 4)
                    seconds = round(first_token(model, package, cache, given.placement), 3)
                    runs.append({"state": state, "version": version, "seconds": seconds, "in_page_cache": cached})
                    print(f"{state:16} {version:6} {seconds:7.2f} s, {cached:.0%} in the page cache", flush=True)
    medians = {
        state: {
            version: median(run["seconds"] for run in runs if (run["state"], run["version"]) == (state, version))
            for version in trees
        }
        for state in given.states
    }
    result = {
        "commit": commit(),
        "before": commit_of(given.before),
        "machine": {"cores": len(os.sched_getaffinity(0)), "gpu": gpu(), "python": platform.python_version()},
        "model": {"size": given.size, "bytes": sum(file.stat().st_size for file in files), "files": len(files)},
        "placement": given.placement,
        "seconds": medians,
        "ratio": {state: round(found["now"] / found["before"], 3) for state, found in medians.items()},
        "seconds_more": {state: round(found["now"] - found["before"], 3) for state, found in medians.items()},
        "runs": runs,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    for state, found in medians.items():
        print(f"{state}: {found['before']:.2f} s before, {found['now']:.2f} s now ({result['ratio'][state]})")


def packaged(tree: Path, place: Path) -> Path:
    """Copy a checkout's `rptrain` as it is installed, with kernels and models in it; return the entry for sys.path."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(tree / "rptrain", place / "rptrain", ignore=ignore)
    for name in ("kernels", "models"):
        shutil.copytree(tree / name, place / "rptrain" / name, ignore=ignore)
    return place


def first_token(model: Path, package: Path, cache: Path, placement: str) -> float:
    """Seconds from the start of the command to its first output."""
    command = [sys.executable, "-P", "-m", "rptrain", "generate", str(model), "--prompt", PROMPT]
    command += ["--max-new-tokens", "1", "--placement", placement]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(package, cache))
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - began
    process.stdout.read()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} has failed")
    return seconds


def environment(package: Path, cache: Path | None = None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path} | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | own


def write_model(folder: Path, size: str) -> None:
    """Write a Llama with random weights and a tokenizer of bytes."""
    hidden, inner, layers, heads, groups, vocabulary = SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder)
    keys = hidden // heads * groups
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        own = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    names = [*shapes]
    each = -(-len(names) // SHARDS)
    generator, places = np.random.default_rng(0), dict[str, str]()
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        shard = {name: shapes[name] for name in names[number * each : (number + 1) * each]}
        places |= dict.fromkeys(shard, file)
        write_shard(folder / file, shard, generator)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_shard(file: Path, shapes: dict[str, tuple[int, ...]], generator: np.random.Generator) -> None:
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in shapes.values():
            rest = int(np.prod(shape))
            while rest:
                count = min(rest, 1 << 25)
                random = np.frombuffer(generator.bytes(2 * count), np.uint16)
                stream.write((random & 0x807F | EXPONENT if len(shape) > 1 else np.full(count, ONE, np.uint16)).data)
                rest -= count
        stream.flush()
        os.fsync(stream.fileno())


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0} | {letter: number for number, letter in enumerate(letters, 1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@contextmanager
def opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def drop(file: Path) -> None:
    """Drop a file from the page cache."""
    with opened(file) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read(file: Path) -> None:
    """Read a file into the page cache."""
    buffer = bytearray(1 << 24)
    with opened(file) as descriptor:
        while os.readv(descriptor, [buffer]):
            pass


def resident(file: Path) -> int:
    """Bytes of a file that are in the page cache, as the system says."""
    size = file.stat().st_size
    with opened(file) as descriptor, mmap.mmap(descriptor, size, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        memory = (ctypes.c_ubyte * size).from_buffer(mapped)
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(memory), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        del memory
        return min(size, int((np.frombuffer(bytes(pages), np.uint8) & 1).sum()) * mmap.PAGESIZE)


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def commit_of(tree: Path) -> str:
    """The commit of a checkout; "unknown" if it is not one."""
    command = ["git", "-C", str(tree), "rev-parse", "--verify", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    main(sys.argv[1:])
