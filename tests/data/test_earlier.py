"""Content hashes of earlier versions. The constants are what rptrain of commit f3c55e3f makes of the same data."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rptrain.data import cache, earlier
from rptrain.data.earlier import is_content_hash
from rptrain.data.formats import Tally
from rptrain.data.pieces import piece
from rptrain.data.sequences import build
from rptrain.data.split import once, split
from rptrain.data.tokens import TOKENS, Document, Origin, gather

TOKENIZER = SimpleNamespace(
    backend_tokenizer=SimpleNamespace(to_str=lambda: '{"a": 1}'), special_tokens_map={"eos_token": "</s>"}
)
WHOLE = "8bf67e087246376a2744187ab071fd5bb937b650d1894c5231f424e1a0a52b34"
TRAINED = "25dc129ada6743abdd151f2f69a10aff8f0418d948824ec8d6c5f8ecaab38f4c"
HELD_OUT = "ceb2011b58056dda6eb4f593db125a268a290b5f02cdc84abb78e19ffe31131d"
# With other versions of transformers and tokenizers, and other words about the bad row: the hash, and what the files of
# the cache say.
OTHER = "d1f8934535cb60206b4d659d197cf056deff3c457facdc6dd2ffd1872abf1e2f"
OTHER_FILES = {
    "a.jsonl": (
        '{"largest": 12, "total": 41, "bad": 1, "first": ["3: other words"], '
        '"key": "31275f34ede02b11af5c89456b59e82287e23e84e972ef6854164c6b0f27864a"}',
        "0e087717cfc43e5d9998ad37df646073f6c501e0b57230eccc262e6ff622ca16",
    ),
    "b.JSON": (
        '{"largest": 55, "total": 41, "bad": 1, "first": ["41: \\u00e9"], '
        '"key": "cadb8182db08888a2a30d5c5e5a06f866eac7d2df03461916140155faac9bce3"}',
        "31e1ef4fb4a2eb66e46fb1a0040b7e2a729b1ad7e8b7f4ed601d135ea1b86e92",
    ),
}
# With the words alone: the hash, and the cached file of a.jsonl.
REWORDED = "124c627eb1c392621aa6cddee51917f53d42049063416ef92f5b882b950d40f9"
REWORDED_FILE = (
    '{"largest": 12, "total": 41, "bad": 1, "first": ["3: other words"], '
    '"key": "2961c678ee0f95f84db3d2b2b17dbee91e2d61044a1d0e4e0181998254cba08e"}',
    "1312219f573b571acf9ad6f24781772c9772a3efd6bf6636d877b61a85427d10",
)


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.20.0")
    monkeypatch.setattr("tokenizers.__version__", "0.22.1")


def documents(first, count):
    for line in range(1, count + 1):
        ids = np.arange(first, first + 3 + line % 4, dtype=np.int32)
        yield Document(line, ids, ids % 3 > 0, divisible=line % 5 == 0)


def stream(folder, name, first, bad):
    (folder / name).write_text(f'{{"text": "{name}"}}\n')
    tally = Tally(41, 1, [bad])
    origin = Origin(folder / name, "auto", TOKENIZER, "{{ é }}", True, tally, folder / "kept")
    stored = cache.store(folder / "kept", f"today's {name}", documents(first, 40), tally)
    return replace(stored, name=name, origin=origin)


def sequences(folder, bad="3: not JSON", first=7):
    files = [stream(folder, "a.jsonl", first, bad), stream(folder, "b.JSON", 50, "41: é")]
    streams = [*files, gather(documents(3, 9), "builtin")]
    return build(streams, piece(streams, 5, "truncate"), packing=True, pad_id=2, seed=3, weights=[1.0, 0.5, 2.0])


def leave(file, stream, facts, digest):
    """A file of the cache as earlier versions wrote it."""
    arrays, header = b"", {"__metadata__": {"facts": facts, "sha256": digest}}
    for name, dtype in TOKENS.items():
        part = getattr(stream, name).tobytes()
        offsets = [len(arrays), len(arrays) + len(part)]
        kind = "BOOL" if dtype is np.bool_ else "I32"
        header[name] = {"dtype": kind, "shape": [len(getattr(stream, name))], "data_offsets": offsets}
        arrays += part
    file.write_bytes((65528).to_bytes(8, "little") + json.dumps(header).encode().ljust(65528) + arrays)


def test_hashes_are_computed(tmp_path):
    whole = sequences(tmp_path)
    trained, held_out = split(whole, 0.2, 3)
    assert is_content_hash(WHOLE, whole) and is_content_hash(WHOLE, once(whole)), "weights are not those of the set"
    assert is_content_hash(TRAINED, trained) and is_content_hash(HELD_OUT, held_out)
    assert not is_content_hash(HELD_OUT, trained) and not is_content_hash(None, whole)


def test_pieces_of_arrays_are_hashed(tmp_path, monkeypatch):
    """Pieces end within arrays and at their ends; some arrays are within a piece."""
    whole = sequences(tmp_path)
    for size in (720, 100, 1000):
        monkeypatch.setattr(earlier, "PIECE", size)
        monkeypatch.setattr(cache, "PIECE", size)
        file = earlier._File(whole.streams[0], whole.streams[0].origin)
        (path,) = (tmp_path / "kept").glob("today's a*")
        with path.open("rb") as opened:
            assert file._pieces == cache._piece_digests(opened.fileno(), path.stat().st_size - cache.HEADER)


def test_other_data_is_not_recognized(tmp_path):
    assert not is_content_hash(WHOLE, sequences(tmp_path, first=8))
    (tmp_path / "more").mkdir()
    whole = sequences(tmp_path / "more")
    (tmp_path / "more/a.jsonl").write_text("a source of the same tokens")
    assert not is_content_hash(WHOLE, whole)


@pytest.mark.parametrize("change", [{"template": "{{ e }}"}, {"format": "text"}, {"assistant_only_loss": False}])
def test_other_settings_are_not_recognized(tmp_path, change):
    whole = sequences(tmp_path)
    streams = [replace(one, origin=one.origin and replace(one.origin, **change)) for one in whole.streams]
    assert is_content_hash(WHOLE, whole) and not is_content_hash(WHOLE, replace(whole, streams=tuple(streams)))


def test_files_of_the_cache_are_found(tmp_path):
    """Those of other versions of the libraries; other files in the folder do not matter."""
    whole = sequences(tmp_path)
    assert not is_content_hash(OTHER, whole)
    for one in whole.streams[:2]:
        leave(tmp_path / f"kept/{one.name}.safetensors", one, *OTHER_FILES[one.name])
    (tmp_path / "kept/other.safetensors").write_bytes(bytes(65536 + 1240))
    (tmp_path / "kept/folder.safetensors").mkdir()
    assert is_content_hash(OTHER, whole) and is_content_hash(WHOLE, whole)
    leave(tmp_path / "kept/a.jsonl.safetensors", whole.streams[0], OTHER_FILES["a.jsonl"][0], REWORDED_FILE[1])
    assert not is_content_hash(OTHER, whole), "its hash is not that of its arrays"


def test_one_file_is_found_and_another_computed(tmp_path):
    """The words about the bad row of the first file have changed since."""
    whole = sequences(tmp_path)
    assert not is_content_hash(REWORDED, whole)
    leave(tmp_path / "kept/old.safetensors", whole.streams[0], *REWORDED_FILE)
    assert is_content_hash(REWORDED, whole)


def test_files_of_several_versions(tmp_path):
    """Each file has been in the cache of several versions; the run's is neither the newest nor the oldest of all."""
    whole = sequences(tmp_path)
    first, second, _ = whole.streams
    for number, (one, facts) in enumerate([(first, REWORDED_FILE), (first, OTHER_FILES["a.jsonl"])]):
        leave(tmp_path / f"kept/{number}.safetensors", one, *facts)
    leave(tmp_path / "kept/2.safetensors", second, *OTHER_FILES["b.JSON"])
    assert is_content_hash(OTHER, whole)
    found = whole.hash_of([REWORDED_FILE[1], OTHER_FILES["b.JSON"][1], whole.streams[2].digest])
    assert is_content_hash(found, whole)
