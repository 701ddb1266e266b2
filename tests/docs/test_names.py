"""Names in the documents: keys of the config, TOML, files and links."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from rptrain.config.errors import ConfigError
from rptrain.config.resolve import resolve
from rptrain.config.schema import Config, keys

from .reading import DOCUMENTS, ROOT, all_blocks, prose, spans

TABLES = "|".join(Config.model_fields)
SETTING = re.compile(rf"((?:{TABLES})\.[a-z_]+)(?:\s*=\s*(.+))?")
EARLIER = {"lora.alpha", "lora.dropout", "lora.rslora", "lora.double_quant"}  # keys of earlier versions, named as such
FILES = (".py", ".md", ".toml", ".safetensors", ".jsonl", ".json", ".c")
FOLDERS = r"rptrain|tests|kernels|models|benchmarks|docs|\.ci"
BASE = {"model": '[model]\npath = "model"\n', "train": '[[data.train]]\npath = "chats.jsonl"\n'}
NEEDED = {  # settings beside which a quoted one is meant
    "model.hold": ["lora.r=8"],
    "train.early_stopping_patience": ["data.val_size=1", "train.eval_steps=1"],
    "train.eval_on_start": ["data.val_size=1"],
    "log.sample_prompts": ["data.val_size=1"],
    "save.load_best_model_at_end": ["data.val_size=1", "train.eval_steps=1", "save.save_steps=1"],
}


def documents(*, but: str = "decisions") -> list[Path]:
    """Those that describe the present."""
    return [document for document in DOCUMENTS if document.parent.name != but]


def base(text: str) -> str:
    """What a fragment of a config leaves out."""
    given = tomllib.loads(text)
    return "".join(
        part for name, part in BASE.items() if not (name in given if name == "model" else name in given.get("data", {}))
    )


@pytest.mark.parametrize("block", all_blocks("toml"), ids=lambda block: block.place.replace("/", "-").replace(":", "-"))
def test_every_toml_block_is_a_config_or_a_part_of_one(block):
    resolve("c.toml", (), base(block.text) + block.text)


def test_every_setting_in_a_sentence_exists():
    known, found, faults = keys(), 0, list[str]()
    for document in documents():
        for place, text in spans(document):
            match = SETTING.fullmatch(text)
            if match is None or match[1] in EARLIER or match[1].endswith(FILES):
                continue
            found += 1
            if match[1] not in known:
                faults.append(f"{place}: no key {match[1]}")
            if match[1] not in known or match[2] is None or re.search("…|[A-Z]$", match[2]):
                continue
            needed = [*NEEDED.get(match[1], ()), f"{match[1]}={match[2]}"]
            try:
                resolve("c.toml", needed, base(""))
            except ConfigError as error:
                faults.append(f"{place}: {error}")
    assert found > 150 and faults == []


@cache
def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere():
    faults = list[str]()
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in anchors(file)):
                faults.append(f"{document.relative_to(ROOT)}: {target}")
    assert faults == []


def test_every_file_in_a_sentence_exists():
    named = [(place, re.sub("[A-Z]{2,}", "*", text)) for document in documents() for place, text in spans(document)]
    paths = [(place, text) for place, text in named if re.fullmatch(rf"(?:{FOLDERS})/[\w./*-]+", text)]
    assert len(paths) > 200
    assert [f"{place}: {text}" for place, text in paths if not any(ROOT.glob(text.rstrip("/")))] == []
