"""Tokenized files: kept by content, safe against damage and against others who write the same."""

import errno
import json
import os
import resource
import threading
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rptrain.config.schema import Data, TrainSet
from rptrain.data import cache, formats, template
from rptrain.data.formats import Tally
from rptrain.data.loader import prepare
from rptrain.data.template import encode
from rptrain.data.tokens import Document, gather
from rptrain.utils.errors import UserError
from rptrain.utils.limited import Pool, call

from ..refusals import refuse
from .documents import tokens_of


def row(number):
    said = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": "hi " * (number % 7 + 1)}]
    return json.dumps({"messages": said})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(row(number) for number in range(150)) + "\n{\n")
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """The files that were read and tokenized."""
    seen, read = [], formats.read

    def watched(path, *arguments):
        seen.append(path.name)
        return read(path, *arguments)

    monkeypatch.setattr(formats, "read", watched)
    return seen


def go(folder, tokenizer, name="rows.jsonl", seed=0, **options):
    train = [TrainSet(path=str(folder / name))]
    return prepare(
        Data(train=train, cache_dir=str(folder / "kept"), **{"max_length": 64} | options), tokenizer, seed=seed
    )


def test_the_same_is_tokenized_once(folder, tokenizer, reads, caplog):
    first = go(folder, tokenizer)
    caplog.clear()
    again = go(folder, tokenizer)
    assert reads == ["rows.jsonl"]
    assert tokens_of(again) == tokens_of(first) and again.content_hash == first.content_hash
    assert "1 of 151 rows are bad" in caplog.text and "rows.jsonl:151: " in caplog.text, "bad rows are told every time"


def test_bad_rows_of_a_file_in_two_sets_count_once(folder, tokenizer):
    sets = [TrainSet(path=str(folder / "rows.jsonl"), weight=weight) for weight in (1.0, 2.0)]
    rows = prepare(Data(train=sets, max_length=64, cache_dir=str(folder / "kept")), tokenizer).rows
    assert (rows.bad, rows.total, len(rows.first)) == (1, 151, 1)
    sets = [sets[0], TrainSet(path=str(folder / "rows.jsonl"), format="messages")]
    rows = prepare(Data(train=sets, max_length=64, cache_dir=str(folder / "kept")), tokenizer).rows
    assert (rows.bad, rows.total) == (2, 302), "another format has other bad rows"


def test_tokens_are_mapped_and_not_read(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 0)
    part = go(folder, tokenizer).streams[0].tokens
    while isinstance(part, np.ndarray) and not isinstance(part, np.memmap):
        part = part.base
    assert isinstance(part, np.memmap)


@pytest.mark.parametrize("code", [errno.ENODEV, errno.EOPNOTSUPP], ids=["ENODEV", "EOPNOTSUPP"])
def test_tokens_are_read_where_nothing_can_be_mapped(folder, tokenizer, monkeypatch, code):
    monkeypatch.setattr(cache, "SMALL", 0)
    mapped = go(folder, tokenizer)
    monkeypatch.setattr(np, "memmap", lambda *_: refuse(code))
    assert tokens_of(go(folder, tokenizer)) == tokens_of(mapped)


def test_small_files_are_not_kept_open(folder, tokenizer, monkeypatch):
    """Of a folder with thousands of them."""

    def left_open(limit):
        monkeypatch.setattr(cache, "SMALL", limit)
        before = len(os.listdir("/proc/self/fd"))
        rows = go(folder, tokenizer)
        return len(os.listdir("/proc/self/fd")) - before, rows

    call(len, "")  # the process that renders conversations is there, and stays
    assert [left_open(cache.SMALL)[0], left_open(0)[0]] == [0, 1]


def test_more_large_files_than_may_be_open(folder, tokenizer, monkeypatch):
    (folder / "many").mkdir()
    for number in range(40):
        (folder / f"many/{number}.jsonl").write_text(row(number))
    monkeypatch.setattr(cache, "SMALL", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd")))
    monkeypatch.setattr(cache, "allow_open", lambda files, allow=cache.allow_open: allow(max(files, soft)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 20, hard))
    try:
        assert len(go(folder, tokenizer, "many").streams) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_cache_is_the_same_with_any_number_of_processes(folder, tokenizer, monkeypatch):
    """Under torchrun, processes share the cores."""
    monkeypatch.setattr(template, "ROWS", 2)
    monkeypatch.setattr("rptrain.utils.parallel.cores", lambda: 4)
    counts, pool = list[int](), template.Pool
    monkeypatch.setattr(template, "Pool", lambda count: counts.append(count) or pool(count))
    written = set[bytes]()
    for world in ("4", "2", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", world)
        go(folder, tokenizer)
        (file,) = (folder / "kept").glob("*.safetensors")
        written.add(file.read_bytes())
        file.unlink()
    assert counts == [1, 2, 4] and len(written) == 1


def test_processes_end_with_a_cache_that_cannot_be_written(folder, tokenizer, monkeypatch):
    """Before the error is raised, not when the generator is collected as garbage, maybe by one of its own threads."""
    pools = list[Pool]()
    monkeypatch.setattr(template, "Pool", lambda count: pools.append(Pool(count)) or pools[-1])

    def full(cache_folder, key, documents, tally):
        next(iter(documents))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "store", full)
    with pytest.raises(OSError, match="No space left") as raised:
        go(folder, tokenizer)
    (pool,) = pools
    assert raised.tb, "it refers to the generator"
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(range, 3)


def test_a_file_is_read_as_its_tokens_are_written(tokenizer, monkeypatch):
    """One without an end, here: only some of it is in memory."""
    endless = ((number, json.loads(row(number))) for number in count(1))
    monkeypatch.setattr(formats, "rows_of", lambda path: endless)
    monkeypatch.setattr(template, "ROWS", 64)
    documents = encode(formats.read("endless.jsonl"), tokenizer, processes=1)
    assert [document.line for document in islice(documents, 500)] == list(range(1, 501))
    assert next(endless)[0] < 500 + 2 * 128


def test_what_tokens_depend_on_is_in_the_key(folder, tokenizer, reads, monkeypatch):
    go(folder, tokenizer)
    go(folder, tokenizer, max_length=32, packing=False, seed=3)
    (folder / "rows.jsonl").rename(folder / "moved.jsonl")
    go(folder, tokenizer, "moved.jsonl")
    assert len(reads) == 1, "rows are laid out anew, and the name is of no account"
    go(folder, tokenizer, "moved.jsonl", assistant_only_loss=False)
    go(folder, tokenizer, "moved.jsonl", chat_template="{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    with (folder / "moved.jsonl").open("a") as file:
        file.write(row(151))
    before = go(folder, tokenizer, "moved.jsonl").content_hash
    assert len(reads) == 4
    monkeypatch.setattr(cache, "code_hash", lambda: "another version")
    assert go(folder, tokenizer, "moved.jsonl").content_hash == before, "the tokens are the same"
    other = load_tokenizer_like(tokenizer)
    go(folder, other, "moved.jsonl")
    assert len(reads) == 6
    for with_tools in ("{{ tools }}", "{{ tools | tojson }}"):
        templates = {"default": tokenizer.chat_template, "tool_use": with_tools}
        monkeypatch.setattr(other, "chat_template", templates)
        go(folder, other, "moved.jsonl")
    assert len(reads) == 8


def load_tokenizer_like(tokenizer):
    """A copy that knows one token more."""
    from copy import deepcopy

    other = deepcopy(tokenizer)
    other.add_tokens(["say"])
    return other


@pytest.mark.parametrize("place", [0, 20, cache.HEADER + 5, -1])
def test_a_damaged_file_is_made_again(folder, tokenizer, reads, caplog, place):
    expected = tokens_of(go(folder, tokenizer))
    (kept,) = (folder / "kept").iterdir()
    content = bytearray(kept.read_bytes())
    content[place] ^= 1
    kept.write_bytes(content)
    damaged = place != 0  # the length before the header is not read
    assert tokens_of(go(folder, tokenizer)) == expected
    assert len(reads) == 1 + damaged and ("is damaged" in caplog.text) == damaged
    assert (kept.read_bytes() == bytes(content)) != damaged


@pytest.mark.parametrize("size", [0, 100, cache.HEADER, cache.HEADER + 1000])
def test_a_file_that_was_cut_is_made_again(folder, tokenizer, reads, size):
    expected = tokens_of(go(folder, tokenizer))
    (kept,) = (folder / "kept").iterdir()
    kept.write_bytes(kept.read_bytes()[:size])
    assert tokens_of(go(folder, tokenizer)) == expected and len(reads) == 2


def test_a_file_that_changes_between_hashing_and_reading(folder, tokenizer, monkeypatch):
    read = formats.read

    def changing(path, *arguments):
        path.write_text(row(7))
        return read(path, *arguments)

    monkeypatch.setattr(formats, "read", changing)
    with pytest.raises(UserError, match=r"rows.jsonl was changed while it was read"):
        go(folder, tokenizer)
    assert not list((folder / "kept").iterdir()), "nothing is kept under the hash of what it was"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_another_users_file_in_a_shared_folder(folder, tokenizer, reads, caplog, mode):
    """It is not trusted, and in a folder like /tmp it could not be replaced."""
    expected = tokens_of(go(folder, tokenizer))
    (theirs,) = (folder / "kept").iterdir()
    content = theirs.read_bytes()
    os.chown(theirs, 4242, -1)
    theirs.chmod(mode)
    for _ in range(2):
        assert tokens_of(go(folder, tokenizer)) == expected
    assert len(reads) == 2, "ours is found again"
    assert caplog.text.count("belongs to another user (uid 4242) and is not used: tokenizing the data again") == 1
    (ours,) = set((folder / "kept").iterdir()) - {theirs}
    assert str(os.geteuid()) in ours.name and theirs.read_bytes() == content


def test_a_file_that_others_may_write_to_is_not_read(folder, tokenizer, reads, caplog):
    expected = tokens_of(go(folder, tokenizer))
    (file,) = (folder / "kept").iterdir()
    file.chmod(0o620)
    for _ in range(2):
        assert tokens_of(go(folder, tokenizer)) == expected
    assert len(reads) == 2 and "may be written by other users (mode 620) and is not used" in caplog.text
    assert [(file.name, file.stat().st_mode & 0o777) for file in (folder / "kept").iterdir()] == [(file.name, 0o600)]
    assert (folder / "kept").stat().st_mode & 0o777 == 0o700


def test_what_another_user_left_cannot_be_removed(folder, tokenizer, monkeypatch):
    (folder / "kept").mkdir()
    (folder / "kept/.old.rptrain-partial").touch()
    monkeypatch.setattr(cache, "ABANDONED", -1)
    unlink = Path.unlink

    def refused(path, *arguments, **options):
        if path.name == ".old.rptrain-partial":
            raise PermissionError(1, "Operation not permitted")
        unlink(path, *arguments, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    assert len(go(folder, tokenizer))


def test_nothing_is_left_of_a_file_that_could_not_be_finished(folder, tokenizer):
    (folder / "rows.jsonl").write_text(row(1) + "\n" + '{"messages": []}\n' * 9)
    for _ in range(2):  # bad rows stop the run the second time too
        with pytest.raises(UserError, match="9 of 10 rows are bad"):
            go(folder, tokenizer)
    (folder / "rows.jsonl").write_text('{"messages": 1}')
    (folder / "latin.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        go(folder, tokenizer, "latin.txt")
    assert not list((folder / "kept").glob("*partial"))


def test_what_killed_runs_left_is_removed_in_time(folder, tokenizer, monkeypatch):
    (folder / "kept").mkdir()
    (folder / "kept/.old.rptrain-partial").touch()
    (folder / "kept/mine.partial").touch()
    go(folder, tokenizer)
    assert (folder / "kept/.old.rptrain-partial").exists(), "somebody may be writing it"
    monkeypatch.setattr(cache, "ABANDONED", -1)
    go(folder, tokenizer, assistant_only_loss=False)
    assert not (folder / "kept/.old.rptrain-partial").exists() and (folder / "kept/mine.partial").exists()


def test_a_folder_that_is_written_beside_the_tokens_stays(folder, tokenizer, monkeypatch):
    """An export's or a checkpoint's: its name ends alike."""
    (folder / "kept/.my.rptrain-partial/new").mkdir(parents=True)
    (folder / "kept/.my.rptrain-partial/new/file").touch()
    monkeypatch.setattr(cache, "ABANDONED", -1)
    go(folder, tokenizer)
    assert (folder / "kept/.my.rptrain-partial/new/file").exists()


def test_two_write_the_same_at_once(tmp_path):
    """Both have begun when one ends; what the first has mapped stays as it was."""
    begun, found = threading.Barrier(2), []

    def documents():
        yield Document(1, np.arange(5, dtype=np.int32), np.ones(5, bool))
        begun.wait(60)
        yield Document(2, np.arange(7, dtype=np.int32), np.ones(7, bool))

    def write():
        found.append(cache.store(tmp_path, "key", documents(), Tally(2)))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    third = cache.load(tmp_path, "key")
    assert third is not None
    for stream in (*found, third[0]):
        assert stream.lengths.tolist() == [5, 7] and (~stream.tokens).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    assert [file.name for file in tmp_path.iterdir()] == ["key.safetensors"]


def test_it_is_a_safetensors_file(tmp_path):
    documents = [Document(3, np.array([5, 6, 7], np.int32), np.array([False, True, True]), divisible=True)]
    stream = cache.store(tmp_path, "key", documents, Tally(1))
    arrays = load_file(tmp_path / "key.safetensors")
    assert arrays["tokens"].tolist() == [5, ~6, ~7] and arrays["lines"].tolist() == [3]
    expected = gather(documents, "f")
    for name, array in arrays.items():
        assert array.dtype == getattr(expected, name).dtype and array.tolist() == getattr(expected, name).tolist()
        assert array.tolist() == getattr(stream, name).tolist()
    assert stream.largest == expected.largest == 7 and stream.supervised.tolist() == [2]


def test_no_documents(tmp_path):
    assert len(cache.store(tmp_path, "key", [], Tally(0))) == 0
    found = cache.load(tmp_path, "key")
    assert found is not None and len(found[0].tokens) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "gone.arrow cannot be read: No such file"),
        ("a\0", "embedded null"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_a_file_that_a_folder_names_and_that_is_not_there(folder, tokenizer, name, message):
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"{name}.arrow"}]}))
    with pytest.raises(UserError, match=message):
        go(folder, tokenizer, ".")


def test_nowhere_to_keep_tokens(folder, tokenizer):
    (folder / "kept").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written: .*kept is not a folder; set data.cache_dir to another"):
        go(folder, tokenizer)


def test_another_files_tokens_under_its_name_are_not_taken(folder, tokenizer, reads, caplog):
    ids = tokens_of(go(folder, tokenizer))
    (kept,) = (folder / "kept").glob("*.safetensors")
    (folder / "rows.jsonl").write_text("\n".join(row(number) for number in range(150, 300)) + "\n")
    kept.rename(folder / "first")
    others = tokens_of(go(folder, tokenizer))
    (other,) = (folder / "kept").glob("*.safetensors")
    (folder / "first").replace(other)
    assert tokens_of(go(folder, tokenizer)) == others != ids and "belongs to other data" in caplog.text
