"""What the documents say of the program in words and tables, compared with where the program says it."""

import json
import re
import tomllib
from pathlib import Path

import torch
from typer.main import get_command

from rptrain.cli.commands import app
from rptrain.config.resolve import resolve
from rptrain.config.schema import keys
from rptrain.data.formats import FORMATS
from rptrain.data.messages import NATIVE, ROLES
from rptrain.engine.optim.traffic import fraction_of_codes, update_bytes
from rptrain.planner.changes import ORDER
from rptrain.planner.learning_rate import LARGE, RATES, as_rate
from rptrain.preflight.checks import TRACKERS
from rptrain.preflight.model import training_model
from rptrain.runs.folder import run_dir
from rptrain.schedule.machine import CARDS

from .reading import ROOT, blocks, prose

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GUIDE = ROOT / "docs" / "guide"


def text(name: str) -> str:
    """The words of a document, without its blocks."""
    return " ".join(prose(ROOT / name).split())


def table(document: Path, heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its own heading."""
    section = document.read_text(encoding="utf-8").split(f"# {heading}\n")[1]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert rows is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows[0].splitlines()[2:]]


def test_versions_are_those_of_pyproject():
    needs = {name: (low, high) for name, low, high in re.findall(r"(\w+)>=([\d.]+),<([\d.]+)", str(PROJECT))}
    low, high = needs["torch"]
    torch_range = f"torch {low} to {high.split('.')[0]}.{int(high.split('.')[1]) - 1}"
    assert torch_range in text("README.md") and torch_range in text("CONTRIBUTING.md")
    for name in ("transformers", "peft"):
        assert f"{name} {needs[name][0]} to below {needs[name][1]}" in text("CONTRIBUTING.md")
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} to " in text("README.md")


def test_extras_that_messages_and_documents_name_exist():
    files = [*(ROOT / "rptrain").rglob("*.py"), *GUIDE.glob("*.md"), ROOT / "README.md"]
    named = {name for file in files for name in re.findall(r"rptrain\[(\w+)\]", file.read_text(encoding="utf-8"))}
    assert {"tensorboard"} < named | set(TRACKERS) <= set(PROJECT["optional-dependencies"])


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1200


def test_keys_that_a_resumed_run_may_change():
    section = text("docs/guide/resume.md").split("You may change ")[1].split(" To extend")[0]
    named = set(re.findall(r"`(\w+\.\w+)`", section)) & set(keys())
    free = {key for key in keys() if run_dir._FREE.fullmatch(key)}
    assert named <= free
    assert {key for key in free - named if key.partition(".")[0] not in ("save", "log", "eval")} == set()


def test_defaults_in_sentences():
    words = " ".join(text(f"docs/guide/{file.name}") for file in sorted(GUIDE.glob("*.md")))
    named = re.findall(r"`(\w+\.\w+)`[^`.]{0,20}\(default: ([\w.]+)\)", words)
    assert len(named) >= 6
    fields = keys()
    assert [(key, value) for key, value in named if str(fields[key].default).lower().removesuffix(".0") != value] == []


def test_options_of_chat_and_their_defaults():
    params = {param.opts[0]: param for param in get_command(app).commands["chat"].params if param.opts[0] != "--help"}
    listed = [row[0].strip("`").split() for row in table(GUIDE / "chat.md", "Talk to a model")]
    assert {words[0] for words in listed} == {name for name in params if name.startswith("--")}
    shown = {words[0]: words[1] for words in listed if len(words) > 1 and not words[1].isupper()}
    assert shown == {name: str(params[name].default) for name in shown}


def test_cards_and_templates():
    words = text("docs/guide/memory.md")
    assert f"`--card` ({', '.join(CARDS)})" in words
    heading, *rows = re.search(r"(?:^\|.*\n)+", prose(GUIDE / "scaling.md").split("a lower one in backward")[1], re.M)[
        0
    ].splitlines()
    columns = [name.split(", ") for name in (cell.strip() for cell in heading.strip("|").split("|"))][1:]
    for row, kind in zip(rows[1:], ("bf16", "fp16", "fp8"), strict=True):
        for names, cell in zip(columns, [cell.strip() for cell in row.strip("|").split("|")][1:], strict=True):
            for name in names:
                card = next(card for card in CARDS.values() if card.name == name)
                peak, share = getattr(card.peak, kind), getattr(card.shares, kind)
                assert cell == ("none" if peak is None else f"{peak:g}, {share:.2f}"), (name, kind)
    names = [row[0].strip("`") for row in table(GUIDE / "data.md", "Chat templates")]
    assert sorted(names) == sorted(file.stem for file in (ROOT / "rptrain/data/templates").glob("*.jinja"))


def test_advice_is_listed_in_its_order():
    listed = [key for row in table(GUIDE / "memory.md", "Out of memory") for key in re.findall(r"`(\w+\.\w+)", row[0])]
    assert listed == [*ORDER]


def test_rows_of_each_format():
    rows = table(GUIDE / "data.md", "Formats")
    assert [name.strip("`") for name, _ in rows] == [*FORMATS]
    for name, cell in rows:
        row = json.loads(re.match("`(.*?)`", cell)[1])
        parsed = FORMATS[name.strip("`")].parse(row)
        assert parsed.get("messages") or parsed["text"]
        assert [kind for kind, one in FORMATS.items() if one.keys <= row.keys()] == [name.strip("`")]
    (thoughts,) = (block.text for block in blocks(GUIDE / "data.md") if block.language == "json")
    assert FORMATS["messages"].parse(json.loads(thoughts))["messages"][1]["reasoning_content"]


def test_roles_of_the_data():
    listed = {}
    for role, others in table(GUIDE / "data.md", "Roles"):
        listed |= {name: role.strip("`") for name in re.findall("`(\\w+)`", others.partition("(")[0])}
    assert listed == {name: role for name, role in ROLES.items() if name != role}
    assert NATIVE == ("observation",)  # see the last row


def test_learning_rates_of_new_runs():
    listed = [row[1:] for row in table(GUIDE / "lora.md", "Rank and learning rate")]
    assert listed == [[as_rate(full), as_rate(adapters)] for full, adapters in (*(one[1:] for one in RATES), LARGE)]


def test_bytes_of_an_update():
    words = text("docs/guide/scaling.md")
    bytes_of = {kind: update_bytes(torch.bfloat16, kind) for kind in ("fp32", "bf16", "int8")}
    assert f"optimizer state they are {bytes_of['fp32']:g}" in words
    assert f"With bfloat16 optimizer state they are {bytes_of['bf16']:g}, with int8 {bytes_of['int8']:.1f}" in words
    _, spec = training_model(resolve(ROOT / "benchmarks/qwen3-1.7b.toml", ["engine.fp8=true"]).config)
    in_fp8 = update_bytes(torch.bfloat16, "fp32", codes=fraction_of_codes(spec.units))
    assert f"{in_fp8:.1f} on average for Qwen3-1.7B" in words
