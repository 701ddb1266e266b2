"""Downloads of data sets into the hub's cache, from a hub on loopback."""

import tomllib

import pytest
from typer.testing import CliRunner

from rptrain.cli.commands import app
from rptrain.data.folders import choose
from rptrain.hub.dataset import Split, download
from rptrain.utils.errors import UserError

ROW = b'{"text": "a"}\n'
FILES = {
    "README.md": b"---\nconfigs: []\n---\n",
    "en/train-1.jsonl": ROW * 400,
    "en/train-2.jsonl": ROW * 3,
    "en/test.jsonl": ROW,
    "en/deep/train-3.jsonl": ROW,
    "en/dev.jsonl": ROW * 2,
    "de/all.jsonl": ROW * 2,
    "dataset_infos.json": b"{}",
    "script.py": b"raise SystemExit",
    "image.png": b"",
}
EN = {
    "config_name": "en",
    "data_files": [{"split": "train", "path": "en/train-*.jsonl"}, {"split": "validation", "path": ["en/test.jsonl"]}],
}
DE = {"config_name": "de", "data_files": "de/*.jsonl"}


def names(splits):
    return {
        split.name: sorted(file.name for file in choose(split.path, split.name if split.shared else "train").files)
        for split in splits
    }


@pytest.mark.parametrize(
    ("configs", "chosen", "expected"),
    [
        ([EN, DE], "en", {"train": ["train-1.jsonl", "train-2.jsonl"], "validation": ["test.jsonl"]}),
        ([EN, {**DE, "default": True}], None, {"train": ["all.jsonl"]}),
        ([DE], None, {"train": ["all.jsonl"]}),
        ([{"config_name": "x", "data_dir": "de"}], "x", {"train": ["all.jsonl"]}),
        ([{"data_files": {"train": "**/train-3.jsonl"}}], None, {"train": ["train-3.jsonl"]}),
        ([{"data_files": ["../../x.jsonl", "/etc/x.jsonl", "hf://x.jsonl", "de/*"]}], None, {"train": ["all.jsonl"]}),
        ([{"data_files": f"en/{'*' * 60}train-[0-1].jso?l"}], None, {"train": ["train-1.jsonl"]}),
        ([], "de", {"train": ["all.jsonl"]}),
        ([], None, {"train": ["train-1.jsonl", "train-2.jsonl", "train-3.jsonl"], "validation": ["dev.jsonl"]}),
    ],
    ids=["splits", "default", "single", "folder", "pattern", "outside", "stars", "no-card", "all"],
)
def test_the_files_of_a_configuration(hub, configs, chosen, expected):
    hub.add("org/data", FILES, "datasets", card={"configs": configs})
    assert names(download("org/data", None, chosen)) == expected


@pytest.mark.parametrize(
    ("files", "configs", "chosen", "message"),
    [
        (FILES, [EN, DE], None, "several configurations.*en, de"),
        (FILES, [EN, DE], "een", "did you mean en"),
        (FILES, [], "fr", "no files in fr"),
        ({"script.py": b"", "image.png": b""}, [], None, r"loading script, which is not run.*refs/convert/parquet"),
    ],
    ids=["several", "typo", "folder", "script"],
)
def test_what_cannot_be_downloaded(hub, files, configs, chosen, message):
    hub.add("org/data", files, "datasets", card={"configs": configs})
    with pytest.raises(UserError, match=message):
        download("org/data", None, chosen)
    assert not hub.asked("/resolve/")


def test_the_command_prints_tables_for_a_config(hub):
    hub.add("org/data", FILES, "datasets", card={"configs": [EN]})
    done = CliRunner().invoke(app, ["download", "org/data", "--dataset", "--config", "en"])
    assert done.exit_code == 0, done.output
    data = tomllib.loads(done.stdout)["data"]
    assert [len(choose(table["path"]).files) for table in (*data["train"], *data["val"])] == [2, 1]


def test_a_split_for_tests_is_not_trained_on():
    tables = {name: Split(name, "f.jsonl").table.split("]")[0] for name in ("train_sft", "test_sft", "dev", "latest")}
    assert tables == {
        "train_sft": "[[data.train",
        "test_sft": "[[data.val",
        "dev": "[[data.val",
        "latest": "[[data.train",
    }


def test_a_data_set_is_not_a_model(hub):
    hub.add("org/data", FILES, "datasets")
    done = CliRunner().invoke(app, ["download", "org/data"])
    assert done.exit_code == 2 and "--dataset" in done.stderr
    done = CliRunner().invoke(app, ["download", "org/data", "--config", "en"])
    assert done.exit_code == 2 and "add --dataset" in done.stderr
