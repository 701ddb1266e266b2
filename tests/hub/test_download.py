"""Downloads of models into the hub's cache, from a hub on loopback."""

import errno
import json
import shutil
from collections import namedtuple
from dataclasses import replace
from threading import Event

import pytest
from huggingface_hub import constants

from rptrain.hub import snapshot, transfer
from rptrain.hub.model import download
from rptrain.hub.repository import RemoteFile
from rptrain.models.locate import cached, locate
from rptrain.utils.errors import TrainingError, UserError
from rptrain.utils.locks import lock
from tests.hub.fake_hub import TOKEN, Fault, sha256

WEIGHTS = bytes(range(256)) * 64
SHARD = WEIGHTS[::-1]
MODEL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "additional_chat_templates/tools.jinja": b"tools",
    "LICENSE": b"as it is",
    "README.md": b"---\nlicense: mit\n---\n",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled" * 1000,
    "model.gguf": b"gguf",
    "original/consolidated.safetensors": WEIGHTS,
    "modeling.py": b"code",
}
READ = {name for name in MODEL if not name.startswith(("pytorch", "model.gguf", "original", "modeling"))}


def accepted(config):
    return None


def get(name="org/name", revision=None, check=accepted):
    said = []
    return download(name, revision, check, said.append).path, said


def test_what_is_read_of_a_model_is_downloaded(hub):
    hub.add("org/name", MODEL)
    path, said = get()
    assert path == locate("org/name") and cached() == [("org/name", path)]
    files = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert files == {name: MODEL[name] for name in READ}
    assert "16.1 KiB" in said[0] and "6 files" in said[0]
    asked = len(hub.requests)
    assert get()[0] == path
    assert len(hub.requests) == asked + 1, "only the list of files is asked for again"


def test_a_cut_download_continues_where_it_was_cut(hub, monkeypatch):
    hub.add("org/name", MODEL)
    monkeypatch.setattr(transfer, "ATTEMPTS", 0)
    hub.faults = [Fault("/cdn/", cut=9000)]
    with pytest.raises(TrainingError, match="run this again"):
        get()
    with pytest.raises(UserError, match="rptrain download"):
        locate("org/name")  # what is incomplete is not taken for a model
    said = get()[1]
    assert [request.range for request in hub.asked("/cdn/")] == [None, "bytes=9000-"]
    assert "already downloaded" in said[0]
    assert (locate("org/name") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_model_that_is_not_complete_is_not_found(hub, monkeypatch):
    hub.add("org/name", MODEL)
    put = snapshot._put

    def fail_at_the_last(blob, place):
        if len([*place.parent.iterdir()]) == len(READ) - 1:
            raise OSError(errno.EIO, "Input/output error")
        put(blob, place)

    monkeypatch.setattr(snapshot, "_put", fail_at_the_last)
    with pytest.raises(OSError, match="Input/output"):
        get()
    assert cached() == []
    monkeypatch.setattr(snapshot, "_put", put)
    assert get()[0] == locate("org/name")


def test_a_connection_that_is_cut_is_opened_again(hub):
    hub.add("org/name", MODEL)
    hub.faults = [Fault("/cdn/", cut=5000, times=3), Fault("/cdn/", status=503, times=2)]
    path, _ = get()
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [None, "bytes=5000-", "bytes=10000-", *["bytes=15000-"] * 3]
    assert [request.range for request in hub.asked("/cdn/")] == ranges


def test_a_connection_that_brings_nothing_is_given_up(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.add("org/name", MODEL)
    hub.faults = [Fault("/cdn/", cut=4000, hangs=True)]
    path, _ = get()
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert [request.range for request in hub.asked("/cdn/")] == [None, "bytes=4000-"]


def test_the_token_is_sent_to_the_hub_alone(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("org/name", MODEL, gated=True, private=True)
    get()
    assert {request.authorization for request in hub.asked("org/name")} == {f"Bearer {TOKEN}"}
    assert [request.authorization for request in hub.asked("/cdn/")] == [None]
    assert not any(TOKEN.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_wrong_content_is_not_kept(hub):
    repo = hub.add("org/name", MODEL)
    get()
    wrong = RemoteFile("model.safetensors", len(WEIGHTS), sha256(SHARD))
    to = locate("org/name") / "new"
    with pytest.raises(TrainingError, match="other content"):
        url = f"{hub.url}/org/name/resolve/{repo.commit}/model.safetensors"
        transfer.download(url, wrong, to, lambda count: None, Event())
    assert not any("new" in file.name for file in to.parent.iterdir())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("/cdn/", status=416), "other content"),
        (Fault("/cdn/", page=WEIGHTS * 2), "other content"),
        (Fault("/resolve/", page=b"<p>log in", times=9), "other content"),
        (Fault("/api/", page=b"<p>log in"), "needs a log-in"),
    ],
    ids=["range", "long", "page", "list"],
)
def test_after_another_answer_the_download_begins_anew(hub, monkeypatch, fault, message):
    hub.add("org/name", MODEL)
    monkeypatch.setattr(transfer, "ATTEMPTS", 0)
    hub.faults = [Fault("/cdn/", cut=9000), replace(fault)]
    for expected in ("run this again", message) if fault.path == "/cdn/" else (message,):
        with pytest.raises(TrainingError, match=expected):
            hub.faults = hub.faults if fault.path == "/cdn/" else [replace(fault)]
            get()
    hub.faults = []
    path, _ = get()
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_two_processes_do_not_write_one_file(hub):
    hub.add("org/name", MODEL)
    blobs = get()[0].parents[1] / "blobs"
    (blobs / sha256(WEIGHTS)).unlink()
    with open(blobs / (sha256(WEIGHTS) + transfer.PARTIAL), "wb") as other:
        assert lock(other.fileno()) is None
        with pytest.raises(UserError, match=r"another process is downloading model\.safetensors"):
            get()
    assert (get()[0] / "model.safetensors").read_bytes() == WEIGHTS


def test_shards_are_those_of_the_index(hub):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {"model-00001-of-00002.safetensors": WEIGHTS, "model-00002-of-00002.safetensors": SHARD}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    hub.add("org/name", {**files, "consolidated.safetensors": WEIGHTS[1:]})
    path, _ = get()
    assert {file.name for file in path.iterdir()} == files.keys()
    hub.add("org/half", {name: files[name] for name in files if "00002-of" not in name})
    with pytest.raises(UserError, match="incomplete"):
        get("org/half")


def test_an_adapter_names_its_base(hub):
    files = {
        "adapter_config.json": b'{"base_model_name_or_path": "org/base"}',
        "adapter_model.safetensors": WEIGHTS,
        "tokenizer.json": b"{}",
        "README.md": b"",
    }
    hub.add("org/adapter", files)
    downloaded = download("org/adapter", None, accepted)
    assert downloaded.base == "org/base"
    assert {file.name for file in downloaded.path.iterdir()} == files.keys()


def test_another_revision_leaves_main_as_it_is(hub):
    repo = hub.add("org/name", MODEL)
    old, _ = get()
    repo.files["tokenizer.json"] = b'{"new": 1}'
    new, _ = get(revision=repo.commit)
    assert new != old and locate("org/name") == old
    assert get()[0] == new == locate("org/name")


REFUSED = {
    "pickled": (
        {"config.json": b"{}", "pytorch_model.bin": WEIGHTS},
        r"neither model\.safetensors.*pytorch_model\.bin",
    ),
    "no-config": ({"model.safetensors": WEIGHTS}, r"no config\.json"),
    "empty-index": (
        {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {}}'},
        "does not name files in safetensors",
    ),
    "odd-index": (
        {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": ["b"]}}'},
        "does not name files in safetensors",
    ),
    "broken-config": ({"config.json": b"{", "model.safetensors": WEIGHTS}, "not valid JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_before_its_weights(hub, case):
    files, message = REFUSED[case]
    hub.add("org/name", files)
    with pytest.raises(UserError, match=message):
        get()
    assert not hub.asked("/cdn/")


def test_an_unsupported_architecture_is_refused_before_its_weights(hub):
    def refuse(config):
        raise UserError(f"{config['architectures']} is not supported")

    hub.add("org/name", MODEL)
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*not supported"):
        get(check=refuse)
    assert not hub.asked("/cdn/")


def test_the_space_is_checked_first(hub, monkeypatch):
    hub.add("org/name", MODEL)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, (64 << 20) + 1000))
    with pytest.raises(UserError, match=r"needs 64\.0 MiB.*HF_HUB_CACHE"):
        get()
    assert not hub.asked("/cdn/")


def test_a_full_disk_keeps_what_was_written(hub, monkeypatch):
    hub.add("org/name", MODEL)
    append = transfer._append

    def full(url, size, partial, done, count, stopping):
        if "model.safetensors" in url and not done:
            partial.write(WEIGHTS[:3000])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(url, size, partial, done, count, stopping)

    monkeypatch.setattr(transfer, "_append", full)
    with pytest.raises(OSError, match="No space left"):
        get()
    get()
    assert [request.range for request in hub.asked("/cdn/")] == ["bytes=3000-"]


ERRORS = {
    "missing": ({}, "org/other", None, UserError, r"no model org/other.*without a token.*--dataset"),
    "private": ({"private": True}, "org/name", None, UserError, r"no model org/name.*hf auth login"),
    "gated": ({"gated": True}, "org/name", None, UserError, r"gated.*/org/name, then.*HF_TOKEN"),
    "revision": ({}, "org/name", "v9", UserError, r"no such revision.*--revision"),
    "no-revision": ({}, "org/name", "..", UserError, "not a revision"),
    "name": ({}, "gpt2", None, UserError, "owner/name"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_repositories(hub, case):
    settings, name, revision, kind, message = ERRORS[case]
    hub.add("org/name", MODEL, **settings)
    with pytest.raises(kind, match=message):
        get(name, revision)


STATUSES = {
    401: (UserError, r"the token in HF_TOKEN.*hf auth login"),
    403: (UserError, r"refuses access.*HTTP 403"),
    429: (TrainingError, "too many requests"),
    500: (TrainingError, r"HTTP 500.*resumes"),
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("at", ["/api/", "/resolve/"], ids=["list", "file"])
def test_errors_of_the_hub(hub, status, at, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.add("org/name", MODEL)
    hub.faults = [Fault(at, status=status, times=99)]
    kind, message = STATUSES[status]
    with pytest.raises(kind, match=message) as caught:
        get()
    assert "hf_wrong" not in str(caught.value)


def test_without_a_network(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TrainingError, match=r"does not answer.*HTTPS_PROXY.*HF_ENDPOINT"):
        get()


def test_offline(hub, monkeypatch):
    hub.add("org/name", MODEL)
    path, _ = get()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        get()
    assert locate("org/name") == path
