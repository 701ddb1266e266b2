"""The embedding table's update in pieces: each element once, whoever asks, and forward before the rest."""

import threading

import pytest
import torch

from rptrain.engine.adam import PIECE, CpuAdam
from rptrain.engine.table_update import TableUpdate

from . import plain, runs

PLAN = "F0-2 FB3-4 B0-2 | N=2 M=4 MR=4"


def recorded(width: int, rows: int, *, pieces: bool = True) -> tuple[TableUpdate, list[list[int] | None]]:
    calls: list[list[int] | None] = []

    def update(numbers: torch.Tensor | None) -> None:
        calls.append(None if numbers is None else numbers.tolist())

    return TableUpdate(width, width * rows, update, pieces=pieces), calls


@pytest.mark.parametrize("width", [16, 1000, PIECE, 2 * PIECE, 2500])
def test_every_piece_is_updated_once_and_rows_in_time(width: int) -> None:
    rows, generator = 3000, torch.Generator().manual_seed(0)
    update, calls = recorded(width, rows)
    for _ in range(4):
        ids = torch.randint(rows, (7,), generator=generator)
        update.rows(ids)
        done = {piece for call in calls for piece in call or ()}
        assert done >= {element // PIECE for row in ids.tolist() for element in (row * width, (row + 1) * width - 1)}
        assert len(done) < -(-rows * width // PIECE)
    update.rest()
    update.rest()
    update.rows(torch.arange(rows))
    assert sorted(piece for call in calls for piece in call or ()) == list(range(-(-rows * width // PIECE)))


def test_without_compiled_code_the_whole_is_updated_at_once() -> None:
    update, calls = recorded(16, 300, pieces=False)
    update.rows(torch.tensor([3]))
    update.rows(torch.tensor([4]))
    update.rest()
    assert calls == [None]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_pieces_have_the_bits_of_the_whole(moments: str) -> None:
    """In any order; the last piece is a short one."""
    numel = 5 * PIECE + 384
    generator = torch.Generator().manual_seed(1)
    wide = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[moments]

    def buffers() -> dict[str, torch.Tensor]:
        generator.manual_seed(1)
        weights = torch.randn(numel, generator=generator).bfloat16()
        found = {
            "source": weights,
            "target": weights,
            "remainder": torch.zeros(numel, dtype=torch.int16),
            "grad": torch.randn(numel, generator=generator).bfloat16(),
            "exp_avg": torch.zeros(numel, dtype=wide),
            "exp_avg_sq": torch.zeros(numel, dtype=torch.uint8 if moments == "int8" else wide),
        }
        if moments == "int8":
            found |= {f"{name}_scale": torch.ones(numel // 128) for name in ("exp_avg", "exp_avg_sq")}
        return found

    options = {"lr": 1e-3, "weight_decay": 0.1, "step": 1, "grad_scale": 0.5, "noise": 77}
    with CpuAdam((0.9, 0.99), 1e-8, 2) as adam:
        if not adam.native:
            pytest.skip("installed without a compiler")
        whole, parts = buffers(), buffers()
        adam.update(**whole, **options)
        for numbers in ([5, 0], [], [3], [1, 2, 4]):
            adam.update(**parts, **options, pieces=torch.tensor(numbers, dtype=torch.int64))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_forward_begins_before_the_table_is_updated(tied: bool) -> None:
    """In sync: the optimizer is held at the layers until the next iteration's first rows were gathered."""
    gathered, order, lock = threading.Event(), [], threading.Lock()

    def probe(where: str) -> None:
        with lock:
            order.append(where)
        if where == "embedding m0" and order.count(where) == 2:
            gathered.set()
        if where.startswith("optimizer update of layers.0"):
            assert gathered.wait(60), "the embedding waits for an update that comes later"

    cfg = plain.config(tie_word_embeddings=tied)
    batches = plain.make_batches(2)
    held = runs.run(cfg, batches[:2], PLAN, asynchronous=False, probe=probe)
    assert held[0] == runs.run(cfg, batches[:2], PLAN, asynchronous=False)[0]
    updates = [where for where in order if where.startswith("optimizer update of")]
    assert updates.index("optimizer update of embed") > updates.index("optimizer update of layers.0")


@pytest.mark.parametrize("round_size", [8, 2, 1])
def test_rows_in_groups_have_the_bits_of_the_whole(round_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first micro-batch, of some, of all; in one round and in several."""
    batches = plain.make_batches(3, micro_batches=8, vocab=3000)
    plan = f"F0-1 FB2-4 B0-1 | N=1 M=8 MR={round_size}"
    parts = runs.run(plain.config(vocab_size=3000), batches, plan, asynchronous=False)
    monkeypatch.setattr(CpuAdam, "native", property(lambda _: False))
    whole = runs.run(plain.config(vocab_size=3000), batches, plan, asynchronous=False)
    assert parts[:2] == whole[:2] and all(torch.equal(parts[2][name], whole[2][name]) for name in whole[2])
