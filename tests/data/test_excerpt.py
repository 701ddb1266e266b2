"""The first rows of data sets: how much is read, which share of the set that is, and what is said of bad rows."""

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rptrain.config.schema import Config, Data, TrainSet
from rptrain.data import excerpt as module
from rptrain.data.amount import amount_of
from rptrain.data.excerpt import Excerpt, Limits, excerpt
from rptrain.data.loader import Batches, prepare
from rptrain.data.read import rows_of
from rptrain.data.split import split
from rptrain.utils.errors import UserError

LIMITS = Limits(rows=64, characters=1 << 20, seconds=60.0)
BAD = '{"messages": []}'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chat(words: int) -> str:
    said = [("user", "hello"), ("assistant", "there " * words)]
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in said]})


def config(*paths: Path, weight: float = 1.0, **data: object) -> Config:
    sets = [{"path": str(path), "weight": weight if number else 1.0} for number, path in enumerate(paths)]
    train = {"micro_batch_size": 1, "global_batch_size": 2}
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": sets, "max_length": 64, **data}, "train": train}
    )


def read(config: Config, tokenizer: object, limits: Limits = LIMITS) -> list[Excerpt]:
    return [excerpt(source, config.data, tokenizer, limits) for source in config.data.train]


@pytest.mark.parametrize("path", ["rows.jsonl", "builtin:tasks"])
def test_what_time_did_not_suffice_for_is_read_again(
    path: str, tmp_path: Path, tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{chat(2)}\n" * 300)
    wanted = config(Path(path) if ":" in path else tmp_path / path)
    limits = Limits(rows=300, characters=1 << 20, seconds=60.0)
    with monkeypatch.context() as patched:
        patched.setattr(module, "time", SimpleNamespace(monotonic=itertools.count(0, 1000).__next__))
        ((few,),) = [each.parts for each in read(wanted, tokenizer, limits)]
    ((more,),) = [each.parts for each in read(wanted, tokenizer, limits)]
    assert few.out_of_time and not more.out_of_time
    assert few.tally.total < 300 <= more.tally.total


@pytest.mark.sample(2, gate=6)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "txt"])
def test_the_share_that_was_read(kind: str, tmp_path: Path, tokenizer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / f"rows.{kind}", [{"text": "hello there " * 9}] * 200
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "csv":
        path.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    elif kind == "txt":
        monkeypatch.setattr("rptrain.data.formats.BEGINNING", 6400)
        path.write_text("hello there " * 9 * 200)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import ipc, parquet

        table = pyarrow.Table.from_pylist(rows)
        if kind == "parquet":
            parquet.write_table(table, path)
        else:
            with ipc.new_stream(path, table.schema) as out:
                out.write_table(table)
    (found,) = read(config(path), tokenizer)
    assert found.share == pytest.approx(6400 / 21600 if kind == "txt" else 64 / 200, rel=0.02)
    assert sum(len(part.stream) for part in found.parts) == (1 if kind == "txt" else 64)
    every = Limits(1000, 1 << 30, 60.0)
    monkeypatch.setattr("rptrain.data.formats.BEGINNING", 1 << 20)
    (found,) = read(config(path), tokenizer, every)
    assert found.whole and sum(len(part.stream) for part in found.parts) == (1 if kind == "txt" else 200)


def test_no_more_rows_are_read(tmp_path: Path, tokenizer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad rows count, and so do characters."""
    taken = []

    def counted(*given: object):
        for row in rows_of(*given):
            taken.append(row)
            yield row

    monkeypatch.setattr("rptrain.data.formats.rows_of", counted)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{chat(1)}\n" + f"{BAD}\n" * 999)
    (found,) = read(config(path), tokenizer)
    assert len(taken) == 64 and (found.tally.total, found.tally.bad) == (64, 63) and not found.whole
    taken.clear()
    path.write_text(f"{chat(99)}\n" * 999)
    (found,) = read(config(path), tokenizer, Limits(rows=500, characters=1000, seconds=60.0))
    assert len(taken) == 2 and found.share == pytest.approx(2 / 999, rel=0.01)


def test_what_only_the_first_rows_lack_is_not_refused(tmp_path: Path, tokenizer: object) -> None:
    """The keys of a format, in any file, and supervised tokens."""
    (tmp_path / "rows").mkdir()
    for number in range(module.FILES + 1):
        first = '{"note": 1}\n' if number in (0, module.FILES) else ""
        (tmp_path / f"rows/{number:02}.jsonl").write_text(first + f"{chat(1)}\n" * 200)
    found = read(config(tmp_path / "rows"), tokenizer, Limits(rows=16, characters=1 << 20, seconds=60.0))
    assert found[0].parts[0].tally.bad == 1
    path = tmp_path / "late.jsonl"
    path.write_text(f"{chat(99)}\n" * 999)
    late = config(path, max_length=4, overlong="truncate")
    assert amount_of(late, read(late, tokenizer)) is None
    path.write_text(f"{chat(99)}\n" * 9)
    with pytest.raises(UserError, match="no token of the data is supervised"):
        amount_of(late, read(late, tokenizer))


def test_what_is_said_of_bad_rows(tmp_path: Path, tokenizer: object) -> None:
    path = tmp_path / "rows.jsonl"

    def check(good: int, bad: int, max_bad_rows: float = 0.01) -> str:
        path.write_text(f"{BAD}\n" * bad + f"{chat(1)}\n" * good)
        return read(config(path), tokenizer)[0].check(max_bad_rows)

    assert check(9, 0) == ""
    with pytest.raises(UserError, match="5 of 15 rows are bad"):
        check(10, 5)
    with pytest.raises(UserError, match="64 of 64 first rows are bad"):
        check(10, 500)
    for allowed in (0, 3):  # more rows are bad already, however many follow
        with pytest.raises(UserError, match=r"data\.max_bad_rows allows (no row|3 rows) to be bad"):
            check(500, 4, allowed)
    assert "5 of 64 first rows are bad" in (said := check(100, 5)) and "allows 1% of the rows to be bad; more" in said
    for limit in (0.5, 5):
        assert "5 of 15 rows are bad" in (said := check(10, 5, limit)) and "They are left out." in said
    with pytest.raises(UserError, match="allows 4 rows to be bad: fix these rows"):
        check(10, 5, 4)
    assert "64 of 64 first rows are bad" in (said := check(10, 500, 900)) and "They are left out." in said
    with pytest.raises(UserError, match=r"(?s)6 of 6 rows are bad.*\nFix these rows, or set the format"):
        check(0, 6, 900)


def test_files_are_read_again_only_if_they_changed(tmp_path: Path, tokenizer: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{chat(1)}\n")
    (first,), (again,) = read(config(path), tokenizer), read(config(path, packing=False), tokenizer)
    assert first.parts is again.parts
    path.write_text(f"{chat(1)}\n{chat(2)}\n")
    assert read(config(path), tokenizer)[0].tally.total == 2


@pytest.mark.parametrize("replaced", [False, True])
def test_a_row_that_was_fixed_at_once_in_the_same_length(tmp_path: Path, tokenizer: object, replaced: bool) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "other"
    path.write_text(f"{chat(1)}\n{chat(2)}\n".replace("messages", "message:"))
    with pytest.raises(UserError, match="no known data format"):
        read(config(path), tokenizer)
    path.write_text(f"{chat(1)}\n{chat(2).replace('messages', 'message:')}\n")
    assert read(config(path), tokenizer)[0].tally.bad == 1
    before = path.stat()
    fixed = other if replaced else path
    fixed.write_text(f"{chat(1)}\n{chat(2)}\n")
    os.utime(fixed, ns=(before.st_atime_ns, before.st_mtime_ns))
    fixed.replace(path)
    assert path.stat().st_size == before.st_size and read(config(path), tokenizer)[0].tally.bad == 0


@pytest.mark.parametrize("val_size", [0.0, 0.25, 3.0])
@pytest.mark.parametrize("packing", [True, False])
def test_the_amount_is_that_of_training(packing: bool, val_size: float, tmp_path: Path, tokenizer: object) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for first, path in enumerate(paths):
        path.write_text("".join(f"{chat(3 + (7 * number) % 90 + first)}\n" for number in range(60)))
    settings = config(*paths, weight=0.5, packing=packing, val_size=val_size)
    rows = prepare(
        Data(train=settings.data.train, max_length=64, packing=packing, cache_dir=str(tmp_path / "c")), tokenizer
    )
    expected = Batches(split(rows, val_size, 0)[0] if val_size else rows, 1, 2, 0)
    for cached in (False, True):
        given = settings.model_copy(
            update={"data": settings.data.model_copy(update={"cache_dir": str(tmp_path / "c")} if cached else {})}
        )
        limits = Limits(rows=1, characters=1, seconds=0.0) if cached else LIMITS
        found = amount_of(given, read(given, tokenizer, limits))
        assert found is not None and found.exact
        assert (found.steps_per_epoch, found.sequences) == (expected.steps_per_epoch, len(expected.order(0)))
        assert found.samples == 120 and found.filled == rows.tokens / (len(rows) * 64)


@pytest.mark.parametrize("packing", [True, False])
def test_an_estimate_is_near(packing: bool, tmp_path: Path, tokenizer: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{chat(1 + (7 * number) % 30)}\n" for number in range(2000)))
    settings = config(path, packing=packing)
    rows = prepare(Data(train=settings.data.train, max_length=64, packing=packing), tokenizer)
    path.write_text(path.read_text() + "\n")  # not in the cache
    found = amount_of(settings, read(settings, tokenizer))
    assert found is not None and not found.exact
    assert found.sequences == pytest.approx(len(rows), rel=0.1) and found.samples == pytest.approx(2000, rel=0.1)


def test_random_tokens_need_no_tokenizer() -> None:
    settings = config(Path("builtin:random"))
    found = amount_of(settings, read(settings, None))
    assert found is not None and (found.sequences, found.steps_per_epoch, found.exact) == (256, 128, True)
    with pytest.raises(UserError, match="needs the model's tokenizer"):
        excerpt(TrainSet(path="builtin:tasks"), settings.data, None, LIMITS)
