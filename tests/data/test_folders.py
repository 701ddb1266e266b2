"""Which files of a folder a split has: what `datasets` says, and nothing is left out without a word."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rptrain.config.schema import Data, TrainSet
from rptrain.data import folders
from rptrain.data.folders import choose
from rptrain.data.loader import Batches, prepare
from rptrain.data.preview import preview
from rptrain.data.read import rows_of
from rptrain.utils.errors import UserError
from tests.ids import plain

from .test_read import ROWS, as_arrow


def make(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(map(json.dumps, ROWS)))


# Files of a folder, and those of each split by the rule of `datasets`.
FOLDERS = [
    ({"mydata_train.jsonl": "train", "mydata_test.jsonl": "test", "notes.jsonl": None}),
    ({"train.jsonl": "train", "more.jsonl": None}),
    ({"trainer.csv": None, "contest.jsonl": None, "dev.csv": "validation"}),
    ({"trainer.csv": "train", "contest.jsonl": "train", "sub/b.jsonl": "train"}),
    ({"data/train_sft-00000-of-2.jsonl": "train", "data/test_sft-00000-of-2.jsonl": "test"}),
    ({"data/train_sft-00000-of-00002.jsonl": "train_sft", "data/test_sft-00000-of-00002.jsonl": "test_sft"}),
    ({"train/a.jsonl": "train", "test/deep/b.jsonl": "test", "extra.jsonl": None, "validation.jsonl": None}),
    ({"my train 2/a.jsonl": "train", "part.eval/b.jsonl": "test"}),
    ({"2train3.jsonl": "train", "valid-1.jsonl": "validation", "my-training.jsonl": "train", "evaluation.csv": "test"}),
]


@pytest.mark.parametrize("files", FOLDERS, ids=lambda files: plain(next(iter(files))))
def test_splits_are_words_of_names(tmp_path, files):
    make(tmp_path, files)
    for split in {*files.values()} - {None}:
        chosen = choose(tmp_path, split)
        expected = sorted(name for name, its in files.items() if its == split)
        assert [file.relative_to(tmp_path).as_posix() for file in chosen.files] == expected
        others = {file.relative_to(tmp_path).as_posix(): why for file, why in chosen.others.items()}
        assert others == {name: its or "belongs to no split" for name, its in files.items() if its != split}
        assert chosen.lost == (None in files.values())


@pytest.mark.parametrize("files", FOLDERS, ids=lambda files: plain(next(iter(files))))
def test_datasets_chooses_the_same(tmp_path, files):
    data_files = pytest.importorskip("datasets.data_files")
    make(tmp_path, files)
    found = {
        str(split): sorted(
            Path(file).relative_to(tmp_path).as_posix()
            for file in data_files.DataFilesList.from_patterns(patterns, base_path=str(tmp_path))
        )
        for split, patterns in data_files.get_data_patterns(str(tmp_path)).items()
    }
    splits = {*files.values()} - {None}
    assert found == {split: sorted(name for name, its in files.items() if its == split) for split in splits}


def test_splits_with_names_of_their_own(tmp_path):
    make(tmp_path, ["data/train_sft-00000-of-00001.jsonl", "data/train_gen-00000-of-00001.jsonl"])
    with pytest.raises(UserError, match=r"split 'train' are in this folder: data/train_gen-\S+ \(train_gen\), "):
        choose(tmp_path)
    make(tmp_path / "two", ["train_sft.jsonl", "train_gen.jsonl"])
    assert names_of(tmp_path / "two", "train_sft") == ["train_sft.jsonl"]


def test_a_name_that_tells_of_two_splits(tmp_path):
    make(tmp_path, ["train_test.jsonl", "train.jsonl"])
    with pytest.raises(UserError, match=r"train_test.jsonl: its name matches the splits test and train: .* pattern"):
        choose(tmp_path)
    pattern = choose(f"{tmp_path}/train[_]*.jsonl")
    assert [file.name for file in pattern.files] == ["train_test.jsonl"]
    with pytest.raises(UserError, match="no file matches this pattern"):
        choose(f"{tmp_path}/*.csv")
    with pytest.raises(UserError, match="it is used as a whole"):
        choose(f"{tmp_path}/*.jsonl", "test")


def test_files_that_are_not_taken_are_named(tmp_path, tokenizer, caplog):
    make(tmp_path, ["train.jsonl", "test.jsonl"])

    def go():
        caplog.clear()
        rows = prepare(
            Data(train=[TrainSet(path=str(tmp_path))], max_length=64, cache_dir=str(tmp_path / ".kept")), tokenizer
        )
        return rows.not_taken

    assert go() == (f"{tmp_path}: 1 file ignored: test.jsonl (test)",) and not caplog.text
    make(tmp_path, ["more.jsonl", "old.jsonl.gz", ".hidden.jsonl", "README.md"])
    (line,) = go()
    named = "more.jsonl (belongs to no split), old.jsonl.gz (unsupported file type), test.jsonl (test)"
    assert line == f"{tmp_path}: 3 files ignored: {named}" and line in caplog.text
    more = TrainSet(path=str(tmp_path / "more.jsonl"))
    both = [TrainSet(path=str(tmp_path)), TrainSet(path=str(tmp_path), split="test"), more]
    rows = prepare(Data(train=both, max_length=64, cache_dir=str(tmp_path / ".kept")), tokenizer)
    assert all("1 file ignored: old.jsonl.gz" in line for line in rows.not_taken)
    assert preview(Batches(rows, 1, 1, 0), tokenizer, 1).not_taken == rows.not_taken


def test_links_that_lead_back_and_links_to_nothing(tmp_path):
    make(tmp_path, ["a.jsonl", "sub/b.jsonl"])
    (tmp_path / "sub/back").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    assert names_of(tmp_path) == ["a.jsonl", "sub/b.jsonl"]
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    assert "gone.jsonl" in names_of(tmp_path), "reading it says that it is not there"


def test_links_that_lead_out(tmp_path, tokenizer, caplog):
    data, outside = tmp_path / "data", tmp_path / "outside"
    make(data, ["a.jsonl", "deep/b.jsonl"])
    make(outside, ["c.jsonl", "more/d.jsonl"])
    (data / "e.jsonl").symlink_to("deep/b.jsonl")
    (data / "c.jsonl").symlink_to("../outside/c.jsonl")
    (data / "more").symlink_to("../outside/more")
    (tmp_path / "entry").symlink_to(data)
    for folder in (data, tmp_path / "entry"):
        assert names_of(folder) == ["a.jsonl", "deep/b.jsonl", "e.jsonl"]
        followed = choose(folder, follow_links=True)
        assert [file.name for file in followed.files] == ["a.jsonl", "c.jsonl", "b.jsonl", "e.jsonl", "d.jsonl"]
        assert not followed.others
    prepare(Data(train=[TrainSet(path=str(data))], max_length=64, cache_dir=str(tmp_path / "kept")), tokenizer)
    assert f"{data}: 2 files ignored: c.jsonl (a link that leads out of the data folder" in caplog.text
    assert choose(data / "c.jsonl").files and choose(f"{data}/c*.jsonl").files, "named by the user"


def test_a_folder_of_links_that_all_lead_out(tmp_path):
    make(tmp_path / "outside", ["a.jsonl"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").symlink_to("../outside/a.jsonl")
    with pytest.raises(UserError, match=r"no data files .* a\.jsonl \(a link that leads out .*data\.follow_links=true"):
        choose(tmp_path / "data")


@pytest.mark.parametrize("name", ["train", "train/part.arrow"])
def test_a_saved_set_with_a_link_that_leads_out(tmp_path, name):
    saved = tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (saved / "train/state.json").write_text('{"_data_files": [{"filename": "part.arrow"}]}')
    (saved / "train/part.arrow").touch()
    assert names_of(saved) == ["train/part.arrow"]
    (saved / name).rename(tmp_path / "moved")
    (saved / name).symlink_to("../" * (name.count("/") + 1) + "moved")
    with pytest.raises(UserError, match=f"{name}: a link that leads out of the data folder: set data.follow_links"):
        choose(saved)
    assert choose(saved, follow_links=True).files == [saved / "train/part.arrow"]


def test_a_split_with_a_link_to_another_folder_of_the_data(tmp_path):
    for folder in ("train", "pool"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "pool/a.jsonl").touch()
    (tmp_path / "train/a.jsonl").symlink_to("../pool/a.jsonl")
    assert names_of(tmp_path) == ["train/a.jsonl"]


def test_a_snapshot_in_the_hub_cache(tmp_path):
    data = tmp_path / "datasets--a--b/snapshots/0f1/data"
    make(tmp_path / "datasets--a--b/blobs", ["5e6"])
    data.mkdir(parents=True)
    (data / "train.jsonl").symlink_to("../../../blobs/5e6")
    assert names_of(data) == ["train.jsonl"] and names_of(data.parent) == ["data/train.jsonl"]


def test_pipes_are_refused_before_they_are_opened(tmp_path):
    make(tmp_path, ["a.jsonl"])
    os.mkfifo(tmp_path / "b.jsonl")
    for path in (tmp_path, tmp_path / "b.jsonl", f"{tmp_path}/*.jsonl", "/dev/zero"):
        with pytest.raises(UserError, match=r"(b.jsonl|zero): pipes, sockets and devices cannot be read"):
            choose(path)


def test_too_many_files(tmp_path, monkeypatch):
    make(tmp_path, ["a.jsonl", "b.jsonl", "c.jsonl"])
    monkeypatch.setattr(folders, "MAX_FILES", 2)
    with pytest.raises(UserError, match="more than 2 files"):
        choose(tmp_path)


def names_of(path, split="train"):
    return [str(file.relative_to(path)) for file in choose(path, split).files]


def test_folders_of_files(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-00001-of-00002.parquet", "train-00000-of-00002.parquet", "test-00000-of-00001.parquet"):
        (tmp_path / "data" / name).touch()
    (tmp_path / "README.md").touch()
    (tmp_path / "dataset_infos.json").touch()
    assert names_of(tmp_path) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert names_of(tmp_path, "test") == ["data/test-00000-of-00001.parquet"]
    message = r"no data files of the split 'dev' are in this folder: data/test-00000-of-00001.parquet \(test\), "
    with pytest.raises(UserError, match=message):
        choose(tmp_path, "dev")
    (tmp_path / "plain").mkdir()
    for name in ("b.jsonl", "a.jsonl", "notes.md", "trainer.csv"):
        (tmp_path / "plain" / name).touch()
    assert names_of(tmp_path / "plain") == ["a.jsonl", "b.jsonl", "trainer.csv"]
    with pytest.raises(UserError, match="no data files of the split 'test'"):
        choose(tmp_path / "plain", "test")


def described(folder, rows):
    """What `Dataset.save_to_disk` leaves: a stream of record batches, and a description of them."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    as_arrow(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def test_what_datasets_saves(tmp_path):
    described(tmp_path / "one", ROWS)
    assert names_of(tmp_path / "one") == ["data-00000-of-00001.arrow"]
    for split in ("train", "test"):
        described(tmp_path / "two" / split, ROWS)
    (tmp_path / "two/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names_of(tmp_path / "two", "test") == ["test/data-00000-of-00001.arrow"]
    with pytest.raises(UserError, match="there is no split 'dev'; it has train, test"):
        choose(tmp_path / "two", "dev")
    (tmp_path / "two/dataset_dict.json").write_text('{"splits": ["../one"]}')
    with pytest.raises(UserError, match=r"'../one' is not the name of a split"):
        choose(tmp_path / "two", "../one")
    (tmp_path / "one/state.json").write_text('{"_data_files": [{"filename": "../../secret.arrow"}]}')
    assert names_of(tmp_path / "one") == ["secret.arrow"], "files outside the folder are not looked at"
    for text in ("[]", '{"_data_files": ["a.arrow"]}', '{"_data_files": {"a": "b"}}', "[" * 100_000):
        (tmp_path / "one/state.json").write_text(text)
        with pytest.raises(UserError, match="not what `datasets` writes"):
            choose(tmp_path / "one")


def test_datasets_itself(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(str(tmp_path / "saved"), num_proc=None)
    (file,) = choose(tmp_path / "saved", "test").files
    assert [row for _, row in rows_of(file)] == ROWS[1:2]
    shutil.rmtree(tmp_path / "saved")
    made.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert [row for file in choose(tmp_path / "saved").files for _, row in rows_of(file)] == ROWS
