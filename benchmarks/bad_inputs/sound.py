"""The sound files that every case starts from.

A slot is a folder with the working folder `work`, the home directory `home`, and `outside`, whose files no command may
read or change. `work` holds the config `r.toml`, the data `data.jsonl`, the model `model`, the unfinished run `runs/x`
with the checkpoints of steps 2, 4 and 6 and an exported model, and the adapter `ad`. Runs contain absolute paths, so
they are trained in the slot, and restored there for each case.
"""

import json
import os
import shutil
from pathlib import Path

CONFIG = """\
[model]
path = "model"
dtype = "float32"

[[data.train]]
path = "data.jsonl"

[data]
max_length = 64

[train]
micro_batch_size = 1
global_batch_size = 2
max_steps = 2

[optim]
learning_rate = 1e-3

[engine]
devices = "cpu:1"
"""
ADAPTER = ("lora.adapter=ad", "lora.r=4", "lora.lora_alpha=8")
RUN = ("log.run_name=x", "train.max_steps=6", "save.save_steps=2")
SECRET = "do-not-read-3f9c"  # content of the files in `outside`
TOKENS = "sound-tokens"  # folder of a slot with the cached tokens of `data.jsonl`
ROWS = 40
NOT_KEPT = {".cache"}  # folders of `home` that programs may write


def row(number: int = 0) -> dict[str, object]:
    word = "abcdefgh"[: 2 + number % 5]
    question = {"role": "user", "content": f"Spell backwards: {word}"}
    return {"messages": [question, {"role": "assistant", "content": word[::-1]}]}


def lines(count: int = ROWS) -> str:
    return "".join(json.dumps(row(number)) + "\n" for number in range(count))


def make(slot: Path) -> None:
    """Writes the sound files of a slot. Imports torch and trains two short runs in this process."""
    from rptrain.checkpoint.export import export
    from rptrain.config.resolve import resolve
    from rptrain.train.run import train
    from tests import run_tools as tools

    work = slot / "work"
    work.mkdir()
    os.chdir(work)
    os.environ |= environment(slot)
    tools.write_model(Path("model"))
    Path("data.jsonl").write_text(lines())
    Path("r.toml").write_text(CONFIG)
    tuned = train(resolve(Path("r.toml"), ["log.run_name=tuned", "lora.r=4", "lora.lora_alpha=8"]), quiet=True)
    export(tuned.path, Path("ad"), None)
    shutil.rmtree("runs")
    run = train(resolve(Path("r.toml"), RUN), quiet=True)
    *records, finished = run.events_path.read_text().splitlines(keepends=True)
    assert '"finished"' in finished
    run.events_path.write_text("".join(records))
    os.chdir(slot)
    outside = slot / "outside"
    outside.mkdir()
    for name in ("secret.txt", "secret.safetensors", "secret.jsonl"):
        (outside / name).write_text(f"{SECRET}\n" * 3)
    (outside / "folder").mkdir()
    (outside / "folder/rows.jsonl").write_text(lines().replace("Spell", SECRET))
    (slot / "home/.cache/rptrain").rename(slot / TOKENS)
    shutil.rmtree(slot / "home")
    (slot / "home").mkdir()
    for name in ("work", "outside", "home"):
        (slot / name).rename(_kept(slot, name))


def restore(slot: Path) -> Path:
    """Brings the sound files back, and returns the working folder."""
    for name in ("work", "outside", "home"):
        shutil.rmtree(slot / name, ignore_errors=True)
        shutil.copytree(_kept(slot, name), slot / name, symlinks=True)
    return slot / "work"


def environment(slot: Path) -> dict[str, str]:
    """Variables that keep the program's own files inside the slot, and the program off the network."""
    return {
        "HOME": str(slot / "home"),
        "XDG_CACHE_HOME": str(slot / "home/.cache"),
        "HF_HOME": str(slot / "home/.cache/huggingface"),
        "HF_HUB_OFFLINE": "1",
    }


def _kept(slot: Path, name: str) -> Path:
    return slot / f"sound-{name}"
