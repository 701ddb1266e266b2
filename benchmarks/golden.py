"""Compare the training runs of this tree with those of another commit, to the bit.

python -m benchmarks.golden COMMIT [CASE...] [--devices cpu:2]: trains each case twice, with the installed rptrain and
with COMMIT's from a temporary directory, and compares losses, gradient norms, exported weights and checkpoints. In the
case "resume", COMMIT's rptrain begins a run and is stopped, and the installed one resumes it. Prints a line per case.
Exits with status 1 if a case differs. Hashes depend on the CPU and on torch's version: do not keep them.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from rptrain.data.tasks import questions

ROOT = Path(__file__).resolve().parent.parent
PRESET = ROOT / "models" / "presets" / "tiny-tasks"
STEPS = 60
SAVED = 20  # steps between checkpoints
CHATS = 400
PATIENCE = 1800  # seconds until a run that is to be stopped has a checkpoint
CONFIG = f"""
[model]
path = "tied"
dtype = "float32"
init = "random"

[[data.train]]
path = "builtin:tasks"

[data]
max_length = 26

[train]
micro_batch_size = 4
global_batch_size = 16
max_steps = {STEPS}

[optim]
learning_rate = 2e-3
weight_decay = 0.1

[save]
save_steps = {SAVED}
resume = "never"
"""
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"tie_word_embeddings": False}, "moe": MOE}
# Keys of the config that a case sets. Adapters are trained on what the case "async" left of the base commit.
LORA = ("model.path=trained", "model.init=auto", "train.method=lora", "lora.r=4")
FILES = ('data.train=[{path="chats.jsonl"}]', "data.max_length=48", "data.val_size=0.1", "train.eval_steps=10")
RESUMED = "resume"
CASES: dict[str, tuple[str, ...]] = {
    "async": (),
    "sync": ("optim.update=sync",),
    "rounds": ("engine.round_size=2",),
    "untied": ("model.path=untied",),
    "moe": ("model.path=moe", "train.router_aux_loss_coef=0.1"),
    "bfloat16": ("model.dtype=bfloat16",),
    "float16": ("model.dtype=float16", "optim.loss_scale=1024", "optim.loss_scale_steps=10"),
    "moments": ("optim.moments=int8",),
    "freeze": ('train.freeze=["model.embed_tokens.weight", "*.mlp.*"]',),
    "lora": LORA,
    "nf4": (*LORA, "model.dtype=bfloat16", "lora.base=nf4"),
    "files": FILES,
    RESUMED: FILES,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--devices", default="cpu:2", help="engine.devices of all runs, default cpu:2")
    given = parser.parse_args()
    if unknown := set(given.cases) - CASES.keys():
        parser.error(f"unknown case {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    verify = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{given.commit}^{{commit}}"]
    if subprocess.run(verify, stdout=subprocess.DEVNULL).returncode:
        parser.error(f"unknown commit {given.commit}: git log --oneline lists them")
    with TemporaryDirectory() as name:
        folder = Path(name)
        package = unpack(given.commit, folder / "package")
        write_models(folder)
        write_chats(folder)
        cases = given.cases or list(CASES)
        if any(LORA[0] in CASES[case] for case in cases):
            trained = train(folder, "trained", CASES["async"], given.devices, package)
            shutil.move(trained / "model", folder / "trained")
        differ = False
        for case in cases:
            begin = resume if case == RESUMED else train
            base = outcome(begin(folder, f"{case}-base", CASES[case], given.devices, package))
            head = outcome(train(folder, f"{case}-head", CASES[case], given.devices, None))
            found = difference(base, head)
            differ |= found is not None
            print(f"{case:10}{len(head):5} values  {found or 'equal'}", flush=True)
    return int(differ)


def unpack(commit: str, package: Path) -> Path:
    """Write the commit's `rptrain` as it is installed, with kernels and models in it; return the entry for sys.path."""
    package.mkdir()
    command = ["git", "-C", str(ROOT), "archive", commit, "rptrain", "kernels", "models"]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", package], input=archive.stdout, check=True)
    for name in ("kernels", "models"):
        shutil.move(package / name, package / "rptrain" / name)
    return package


def write_models(folder: Path) -> None:
    """Write directories with a config and a tokenizer. Their weights are drawn at random."""
    config = json.loads((PRESET / "config.json").read_text())
    for name, changes in MODELS.items():
        shutil.copytree(PRESET, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | changes))
    (folder / "golden.toml").write_text(CONFIG)


def write_chats(folder: Path) -> None:
    """Write a data file of chats of one to three turns, several of which fit a sequence."""
    asked = iter(questions("train", 3 * CHATS))
    chats = [[message for _ in range(1 + number % 3) for message in next(asked).messages] for number in range(CHATS)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def train(folder: Path, name: str, overrides: tuple[str, ...], devices: str, package: Path | None) -> Path:
    """Train in a process of its own, with the installed rptrain or with the one in `package`. Returns the run."""
    process = start(folder, name, overrides, devices, package)
    check(process, name, 0)
    return folder / "runs" / name


def resume(folder: Path, name: str, overrides: tuple[str, ...], devices: str, package: Path) -> Path:
    """Stop a run of the rptrain in `package` after its first checkpoint, and resume it with the installed one.

    Returns the run, without the checkpoint that the stop saved.
    """
    run = folder / "runs" / name
    process = start(folder, name, overrides, devices, package)
    end = time.monotonic() + PATIENCE
    while process.poll() is None and not (run / f"checkpoints/checkpoint-{SAVED}").exists():
        if time.monotonic() > end:
            process.kill()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    check(process, name, 130)
    train(folder, name, (*overrides, "save.resume=auto"), devices, None)
    events = list(map(json.loads, (run / "events.jsonl").read_text().splitlines()))
    (step,) = [event["step"] for event in events if event["event"] == "resumed"]
    if step % SAVED:
        shutil.rmtree(run / f"checkpoints/checkpoint-{step}")
    return run


def start(
    folder: Path, name: str, overrides: tuple[str, ...], devices: str, package: Path | None
) -> subprocess.Popen[str]:
    """Start a run. Each rptrain has a token cache of its own."""
    environment = os.environ | ({"PYTHONPATH": str(package)} if package else {})
    python = [sys.executable, "-P"]
    code = "import rptrain, rptrain.models; print(rptrain.__file__, rptrain.models.__file__, sep='\\n')"
    where = [*python, "-c", code]
    files = subprocess.run(where, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    if not all(Path(file).is_relative_to(package or ROOT) for file in files.splitlines()):
        raise SystemExit(f"Python imports rptrain from {files.split()[0]} instead of {package or ROOT}")
    command = [*python, "-m", "rptrain", "--config", "golden.toml", f"log.run_name={name}", f"engine.devices={devices}"]
    command += [f"data.cache_dir=tokens-{'base' if package else 'head'}", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def check(process: subprocess.Popen[str], name: str, expected: int) -> None:
    """Wait for the end of a run. SystemExit if it has another exit status."""
    _, errors = process.communicate()
    if process.returncode != expected:
        raise SystemExit(f"{name}: exit status {process.returncode} instead of {expected}\n{errors}")


def outcome(run: Path) -> dict[str, str]:
    """The values that must not change: losses and gradient norms by step, and hashes of tensors by file and name."""
    found = {}
    for record in map(json.loads, (run / "events.jsonl").read_text().splitlines()):
        if record["event"] == "step":
            found[f"step {record['step']}"] = f"loss {record['loss']!r}, gradient norm {record['grad_norm']!r}"
    assert len(found) == STEPS, f"{run.name}: {len(found)} steps"
    for file in sorted(run.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            digest = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
            found[f"{file.relative_to(run)} {name}"] = f"{tensor.dtype} {tuple(tensor.shape)} {digest[:16]}"
    return found


def difference(base: dict[str, str], head: dict[str, str]) -> str | None:
    """The first value that differs, in words; None if all are equal."""
    for name in base | head:
        if base.get(name) != head.get(name):
            return f"{name} was {base.get(name, 'absent')}, is {head.get(name, 'absent')}"
    return None


if __name__ == "__main__":
    sys.exit(main())
