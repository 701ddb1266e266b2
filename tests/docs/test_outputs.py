"""Outputs and figures that the documents quote are those that the program gives.

A block without a language has a comment above it. It names the command that prints the lines of the block, in this
order and among others, or says which test compares them ("tested: ..."), or where they were measured ("measured ...").
Where numbers vary, the words alone are compared.
"""

import re
import shlex
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from rptrain.checkpoint.result import Result
from rptrain.checkpoint.run_states import State
from rptrain.cli import argv
from rptrain.cli.commands import app
from rptrain.data.progress import ReadProgress
from rptrain.planner.timings import FILE
from rptrain.runs.records.process import FOLDER as PROCESSES
from rptrain.train.end import TRACEBACK
from rptrain.utils.phases import phase

from ..cases import long
from .reading import ROOT, all_blocks
from .test_commands import OWN

GUIDES = [block for block in all_blocks("") if block.document.parent.name in (ROOT.name, "guide")]
READING, RESULT, FOLDER, TRAINING = (f"tested: {name}" for name in ("reading", "result", "folder of a run", "training"))
LLAMA = "rptrain plan --config benchmarks/qwen3-1.7b.toml model.path=llama-3.1-8b engine.devices=auto --card rtx4090"
ONE_EACH = f"{LLAMA} train.micro_batch_size=1 train.global_batch_size=16 --host 512GiB --gpus"
QWEN = "rptrain plan --config my.toml model.path=qwen3-1.7b train.micro_batch_size=4 train.global_batch_size=64"
SPEED, ACTIVATIONS = r"([\d,]+) tokens/s, bubble", r"activations between stages +([\d.]+) GiB"
# A document, a sentence with figures, the commands that give them, and where each prints one.
FIGURES = [
    ("README.md", r"estimates ([\d,]+) tokens/s for Llama-3.1-8B on eight RTX 4090s", [f"{LLAMA} --gpus 8"], SPEED),
    (
        "docs/guide/memory.md",
        r"plans for one, four and eight RTX 4090s need ([\d.]+), ([\d.]+) and ([\d.]+) GiB",
        [f"{ONE_EACH} 1", f"{ONE_EACH} 4", f"{ONE_EACH} 8"],
        ACTIVATIONS,
    ),
    ("docs/guide/memory.md", "([0-9]+) MiB here", [f"{ONE_EACH} 4"], r"sums of the embedding's gradient +([\d.]+) MiB"),
    long(
        "docs/guide/scaling.md",
        r"estimates ([\d,]+) tokens/s with one replica, ([\d,]+) with two and ([\d,]+) with four",
        [f"{QWEN} --gpus 4 --card rtx4090 engine.replicas={replicas}" for replicas in (1, 2, 4)],
        SPEED,
    ),
]


@cache
def plan(command: str) -> str:
    """What `rptrain plan` prints in a terminal that is wide enough for every line. my.toml is the README's config."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        (Path(folder) / "my.toml").write_text(OWN)
        patch.chdir(ROOT)
        words = [f"{folder}/my.toml" if word == "my.toml" else word for word in shlex.split(command)[1:]]
        result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert "Plan" in result.stdout, result.output
    return result.stdout


def quoted(source: str) -> str:
    (text,) = (block.text for block in GUIDES if block.source == source)
    return text


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d,.]*", "0", line)


def check(text: str, printed: str, *, numbers: bool = True) -> None:
    """Fails with the first quoted line that is not printed, and the printed line that is nearest."""
    rest = [line.strip() for line in printed.splitlines()]
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == "...":
            continue
        seen = rest if numbers else list(map(without_numbers, rest))
        wanted = line if numbers else without_numbers(line)
        near = [one for one in rest if without_numbers(one)[:12] == without_numbers(line)[:12]]
        assert wanted in seen, f"quoted: {line}\nprinted: {near or printed}"
        rest = rest[seen.index(wanted) + 1 :]


def test_every_output_has_a_source():
    known = {READING, RESULT, FOLDER, TRAINING, "drawing"}
    sourced = [block.source in known or block.source.startswith(("rptrain plan ", "measured ")) for block in GUIDES]
    assert [block.place for block, has in zip(GUIDES, sourced, strict=True) if not has] == []


@pytest.mark.parametrize(
    "block",
    [
        long(block) if "qwen3-32b" in block.source else block
        for block in GUIDES
        if block.source.startswith("rptrain plan ")
    ],
    ids=lambda block: block.place.replace("/", "-").replace(":", "-"),
)
def test_a_quoted_plan_is_what_is_printed(block):
    check(block.text, plan(block.source))


@pytest.mark.parametrize(("document", "sentence", "commands", "pattern"), FIGURES)
def test_figures_in_sentences_are_those_of_plans(document, sentence, commands, pattern):
    text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
    figures = re.search(sentence, text)
    assert figures, f"{document} has no such sentence: {sentence}"
    printed = [match[1] for command in commands if (match := re.search(pattern, plan(command)))]
    assert list(figures.groups()) == printed, f"{document}: {figures[0]}"


def test_the_lines_about_reading_data():
    with phase("reading data", unit="") as shown:
        ReadProgress("chats.jsonl", 1, 1, 25_000, 10.0, 2500.0, 0.41, 14.0).show(shown)
        lines = [shown.sentence()] * 2
        ReadProgress("chats.jsonl", 1, 1, 60_000, 24.0, 2500.0, 1.0, None, done=True).show(shown)
        lines.append(shown.summary())
    check(quoted(READING), "\n".join(lines), numbers=False)


def test_the_line_about_a_result():
    run = Path("runs/my")
    newest = State(1800, run / "checkpoints" / "checkpoint-1800")
    check(quoted(RESULT), f"{newest.checkpoint}: {Result(run, newest, False, State(400, model=run)).sentence()}")


@pytest.mark.long
def test_the_first_run_prints_and_writes_what_the_guide_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["train.max_steps=20", "eval.questions=8", "engine.devices=cpu:1"]
    result = CliRunner().invoke(app, argv.arguments(["--config", str(ROOT / "rptrain.toml"), *short]))
    assert result.exit_code == 0, result.output
    check(quoted(TRAINING), result.output, numbers=False)
    tree = re.findall(r"^ {2,4}([\w.-]+)", quoted(FOLDER), re.MULTILINE)
    assert {path.name for path in (tmp_path / "runs" / "tiny-tasks").iterdir()} <= set(tree)
    assert {FILE, PROCESSES, TRACEBACK, "closing.txt"} <= set(tree)
