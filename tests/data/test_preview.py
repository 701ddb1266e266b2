"""Previews of data: `rptrain plan --show-data`, and the first samples in the interface."""

import json
import re
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rptrain.cli.commands import app
from rptrain.config.resolve import resolve
from rptrain.config.schema import Data, TrainSet
from rptrain.data.loader import Batches, prepare
from rptrain.data.preview import first_samples, preview, show
from rptrain.utils.errors import UserError

CHATS = [
    [
        ("system", "brief"),
        ("user", "two and two?"),
        ("assistant", "four"),
        ("user", "?"),
        ("assistant", "él\x1b[2J"),
    ],
    [("user", "hello there " * 40), ("assistant", "never seen")],
    [("user", "hello"), ("assistant", "hello there " * 40)],
]


@pytest.fixture
def batches(tmp_path, tokenizer):
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = prepare(Data(train=[TrainSet(path=str(tmp_path / "rows.jsonl"))], max_length=64), tokenizer)
    return Batches(rows, 1, 1, 0)


def test_samples_and_counts(batches, tokenizer):
    found = preview(batches, tokenizer, 5)
    assert sorted(sample.place.rpartition(":")[2] for sample in found.samples) == ["1", "3"]
    first = next(sample for sample in found.samples if sample.place.endswith(":1"))
    turn = "<|im_start|>"
    assert [(part.text, part.supervised) for part in first.parts] == [
        (f"{turn}system\nbrief<|im_end|>\n{turn}user\ntwo and two?<|im_end|>\n{turn}assistant\n", False),
        ("four<|im_end|>", True),
        (f"\n{turn}user\n?<|im_end|>\n{turn}assistant\n", False),
        ("él\x1b[2J<|im_end|>", True),
        ("\n", False),
    ]
    assert sum(sample.tokens for sample in found.samples) == found.tokens == batches.sequences.tokens
    assert sum(sample.supervised for sample in found.samples) == found.supervised
    assert (found.samples_read, found.cut, found.unsupervised, found.rows, found.steps_per_epoch) == (3, 2, 1, 2, 2)
    assert found.padding == 1 - found.tokens / (2 * 64)
    assert len(preview(batches, tokenizer, 1).samples) == 1
    assert json.loads(json.dumps(found.to_dict()))["samples"][0]["parts"][1]["supervised"] is True


def config_of(path, *keys):
    text = f'[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "{path}"\n[data]\n' + "\n".join(keys)
    return resolve(path.with_suffix(".toml"), text=text).config


def test_first_samples(tmp_path):
    path = tmp_path / "rows.jsonl"
    chats = [[("user", "abc"), ("assistant", answer)] for answer in ("cba", "x" * 99, "abcabc")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    path.write_text("\n".join(map(json.dumps, [{"messages": []}, *rows])))
    found = first_samples(config_of(path, "max_length = 26"), 2)
    assert found.about.startswith("conversations, ") and [s.place for s in found.samples] == [f"{path}:2", f"{path}:3"]
    question, answer, *_ = found.samples[0].parts
    assert question.text.endswith("<|assistant|>") and (answer.text, answer.supervised) == ("cba<|end|>", True)
    assert found.samples[1].tokens == 26, "truncated as in training"
    dropping = config_of(path, "max_length = 26", 'overlong = "drop"')
    assert [sample.place for sample in first_samples(dropping, 2).samples] == [f"{path}:2", f"{path}:4"]


def test_samples_without_a_supervised_token_beyond_the_first_ones_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    answer = {"role": "assistant", "content": "cba"}
    questions = [{"role": "user", "content": f"abc {line}"} for line in range(1, 11)]
    rows = [{"messages": [turn] if line in (7, 9) else [turn, answer]} for line, turn in enumerate(questions, 1)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = first_samples(config_of(path), 2)
    counted = f"2 of 10 samples have no supervised token and are left out: {path}:7, {path}:9"
    assert len(found.samples) == 2 and found.warnings == (counted,)


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_what_training_leaves_out_is_not_shown(overlong, tmp_path):
    """Rows that the template rejects, a question as long as a sequence, and a file without any good row."""
    (tmp_path / "data").mkdir()
    paths = [tmp_path / "data" / f"{name}.jsonl" for name in "ab"]

    def row(question, **more):
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "cba"}], **more}

    rejected = row("abc", tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    for path, rows in zip(
        paths, ([rejected, row("x" * 200)], [*[rejected] * 3, row("y" * 200), row("abc")]), strict=True
    ):
        path.write_text("\n".join(map(json.dumps, rows)))
    found = first_samples(config_of(tmp_path / "data", "max_length = 32", f'overlong = "{overlong}"'), 2)
    # the last piece of a question that was split has the answer
    shown = {"split": [f"{paths[0]}:2", f"{paths[1]}:4"]}.get(overlong, [f"{paths[1]}:5"])
    assert [sample.place for sample in found.samples] == shown
    assert all(sample.supervised for sample in found.samples)
    paths[1].unlink()
    if overlong != "split":
        with pytest.raises(UserError, match=r"a\.jsonl:1: the chat template does not write `tools`"):
            first_samples(config_of(tmp_path / "data", "max_length = 32", f'overlong = "{overlong}"'), 2)
        paths[0].write_text(json.dumps(row("x" * 200)))
        with pytest.raises(UserError, match="nothing to train on") as error:
            first_samples(config_of(tmp_path / "data", "max_length = 32", f'overlong = "{overlong}"'), 2)
        assert ("longer than data.max_length" in str(error.value)) == (overlong == "drop")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "rows.jsonl:1: .*image"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "rows.jsonl:1: "),
    ],
    ids=["image", "surrogate"],
)
def test_first_samples_that_are_all_bad(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=message):
        first_samples(config_of(path), 2)


def printed(found, **options):
    out = StringIO()
    show(found, Console(file=out, width=60, **options))
    return out.getvalue()


def test_brackets_without_colors_and_colors_in_a_terminal(batches, tokenizer):
    found = preview(batches, tokenizer, 5)
    plain = printed(found)
    assert "⟦four<|im_end|>⟧" in plain and "⟦él␛[2J<|im_end|>⟧" in plain and "\x1b" not in plain
    assert "truncated 2 samples" in plain and "left out 1 sample without a supervised token" in plain
    assert re.search(r"\d+% of the tokens are supervised;\s+the\s+sequences\s+are\s+[\d.]+%\s+padding", plain)
    colored = printed(found, force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[32mfour<|im_end|>\x1b[0m" in colored and "⟦" not in colored and "\x1b[2J" not in colored


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:tasks"\nsplit = "test"\n'
        '[data]\nmax_length = 26\n[engine]\ndevices = "cpu:1"\n'
    )
    result = CliRunner().invoke(app, ["plan", "--config", "run.toml", "--show-data", "2", "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout)["data"]
    assert len(data["samples"]) == 2 and data["samples_read"] == 500 and data["cut"] == 0
    question, answer = data["samples"][0]["parts"]
    assert question["text"].startswith("<|user|>") and answer["supervised"] and answer["text"].endswith("<|end|>")
    shown = CliRunner().invoke(app, ["plan", "--config", "run.toml", "--show-data", "1"])
    assert "builtin:tasks:" in shown.stdout and "<|assistant|>⟦" in shown.stdout
    without = CliRunner().invoke(app, ["plan", "--config", "run.toml", "--json"])
    assert without.exit_code == 0 and json.loads(without.stdout)["data"] is None, "the data is not shown unasked"
    missing = CliRunner().invoke(
        app, ["plan", "--config", "run.toml", "--show-data", "1", "data.train.0.path=none.jsonl"]
    )
    assert missing.exit_code == 2 and "none.jsonl: no such data file or folder" in missing.stderr
