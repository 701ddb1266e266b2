"""The loaders of LLaMA-Factory, TRL and axolotl give the same tokens and masks: see make_references.py."""

import json
from pathlib import Path

import numpy as np
import pytest

from rptrain.data.formats import Tally, read
from rptrain.data.template import EncodeOptions, encode

from . import wild

FOLDER = Path(__file__).parent / "references"
KINDS = [(project, kind) for project, kinds in wild.ROWS.items() for kind in kinds]


@pytest.mark.parametrize(("project", "kind"), KINDS)
def test_the_same_tokens_are_learned(tokenizer, tmp_path, project, kind):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, wild.ROWS[project][kind])))
    expected = json.loads((FOLDER / f"{project}.json").read_text())[kind]
    tally = Tally()
    examples = read(tmp_path / "rows.jsonl", tally=tally)
    documents = list(encode(examples, tokenizer, EncodeOptions(chat_template=wild.TEMPLATES[project]), tally=tally))
    found = [np.where(document.supervised, ~document.ids, document.ids).tolist() for document in documents]
    assert found == expected and tally.bad == 0
