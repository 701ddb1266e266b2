"""Checkpoints that several processes write together, of stores in threads of one process."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file

from rptrain.checkpoint.atomic_dir import MANIFEST, STATE, Aside, Damaged, DiskFull, complete_checkpoints, written_aside
from rptrain.checkpoint.consistent import read_model
from rptrain.checkpoint.export import export
from rptrain.checkpoint.processes import OtherFailed, Processes
from rptrain.checkpoint.state import Background, load_state, prune, save_state
from rptrain.checkpoint.unit_tensors import file_layout, header
from rptrain.engine.memory import share
from rptrain.engine.memory.share import Share
from rptrain.models.weights.safetensors_io import as_bytes
from tests.checkpoints import verify_checkpoint
from tests.engine import plain, runs

KINDS = {
    "bfloat16": {"dtype": torch.bfloat16, "asynchronous": True},
    "bfloat16-small": {"dtype": torch.bfloat16, "asynchronous": False, "moments": "bf16"},
    "float16": {"dtype": torch.float16, "asynchronous": True},
    "float16-int8": {"dtype": torch.float16, "asynchronous": False, "moments": "int8"},
    "float32-int8": {"dtype": torch.float32, "asynchronous": True, "moments": "int8"},
    "fp8": {"dtype": torch.bfloat16, "asynchronous": True, "fp8": True, "moments": "int8"},
    "fp8-sync": {"dtype": torch.float16, "asynchronous": False, "fp8": True},
    "frozen": {"dtype": torch.bfloat16, "asynchronous": True, "frozen": ["model.layers.1.*", "model.norm.weight"]},
}
BLOCK = 128  # elements that stay in one process; in runs 65536
CONFIG = plain.config(num_hidden_layers=2, vocab_size=40)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(share, "CHUNK", BLOCK)


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def whole(kind, seed=0):
    """The store of a single process, with random numbers in every buffer that is saved."""
    store = runs.make_store(CONFIG, seed=seed, **KINDS[kind])
    generator = torch.Generator().manual_seed(seed)
    for state in store.units:
        if state.unit.trainable:
            random = [*state.moments.values(), *state.wire[1:], *(state.params[1:])]
            for buffer in [*random, *(each for each in (state.remainder, state.masters) if each is not None)]:
                data = buffer.view(torch.uint8)
                data.copy_(torch.randint(256, data.shape, generator=generator, dtype=torch.uint8))
            state.current, state.before = 0, state.generations - 1
    return store


def divided(kind, world, source=None, seed=0):
    """The stores of so many processes, with the content of that of a single process or with other content."""
    stores = [runs.make_store(CONFIG, seed=seed, share=Share(rank, world, 8), **KINDS[kind]) for rank in range(world)]
    for store in stores if source else []:
        for state, of in zip(store.units, source.units, strict=True):
            for name, buffer in everything(state).items():
                full = everything(of)[name]
                held = full if len(buffer) == len(full) else cut(full, state.own, state.unit.numel)
                buffer.copy_(held)
            state.current, state.before = of.current, of.before
    return stores


def everything(state):
    """The buffers that a checkpoint brings back."""
    if not state.unit.trainable:
        return {}
    wires = {f"wire {generation}": state.wire[generation] for generation in range(len(state.wire))}
    params = {f"params {generation}": flat for generation, flat in enumerate(state.params)}
    rest = {"remainder": state.remainder, "masters": state.masters}
    return params | wires | state.moments | {name: each for name, each in rest.items() if each is not None}


def cut(full, own, numel):
    return full[own.start * len(full) // numel : own.stop * len(full) // numel]


def assert_same(stores, source):
    for store in stores:
        for state, of in zip(store.units, source.units, strict=True):
            assert (state.current, state.before) == (of.current, of.before)
            for name, buffer in everything(state).items():
                full = everything(of)[name]
                wanted = (
                    cut(full, state.own, state.unit.numel) if name[:6] not in ("params", "wire 0", "wire 1") else full
                )
                assert torch.equal(buffer.view(torch.uint8), wanted.view(torch.uint8)), (state.unit.name, name)


class Lost(Exception):
    """A process has ended."""


class Meeting:
    """Exchanges values between threads, which stand for processes. Exchange number `lost` fails."""

    def __init__(self, world, lost=None):
        self._values, self._counts, self._lost = [""] * world, [0] * world, lost
        self._barrier = threading.Barrier(world, timeout=20)

    def gather(self, rank, value):
        self._values[rank] = json.dumps(value)
        self._barrier.wait()
        found = [json.loads(value) for value in self._values]
        self._barrier.wait()
        self._counts[rank] += 1
        if self._counts[rank] - 1 == self._lost:
            raise Lost
        return found


def save(stores, folder, model_dir, step=7, lost=None, calls=None, exchange=lambda gather, value: gather(value)):
    """Saves from all stores, and returns what each process returned or raised. `calls`: options of some processes."""
    meeting = Meeting(len(stores), lost)
    meta = {"model_dir": str(model_dir), "applied": step}
    if stores[0].dtype == torch.float16:
        meta["loss_scale"] = {"scale": 2.0, "before": 2.0, "good": 0}
    if any(not state.unit.trainable for state in stores[0].units):
        meta["frozen"] = {"patterns": KINDS["frozen"]["frozen"], "drawn": False, "seed": 0, "sha256": {}}

    def one(rank):
        gather = partial(exchange, partial(meeting.gather, rank))
        options = {"processes": Processes(rank, gather)} | (calls or {}).get(rank, {})
        return save_state(folder, stores[rank].units, step=step, meta=meta, **options)

    with ThreadPoolExecutor(len(stores)) as pool:
        futures = [pool.submit(one, rank) for rank in range(len(stores))]
    return [future.exception() or future.result() for future in futures]


def checkpoint_of(stores, folder, model_dir, step=7):
    """The checkpoint that all stores save."""
    path = folder / f"checkpoint-{step}"
    assert save(stores, folder, model_dir, step) == [path] * len(stores)
    return path


@pytest.fixture
def saved(tmp_path, model_dir):
    """A checkpoint that four processes have written, and the content."""
    source = whole("bfloat16")
    return checkpoint_of(divided("bfloat16", 4, source), tmp_path / "checkpoints", model_dir), source


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_processes_loads_what_any_number_has_saved(tmp_path, model_dir, kind):
    source = whole(kind)
    stores = [source]
    for step, world in enumerate((4, 3, 1)):
        path = checkpoint_of(stores, tmp_path / "checkpoints", model_dir, step)
        stores = divided(kind, world, seed=step + 1)
        for store in stores:
            state = load_state(path, store.units)
            assert (state["step"], state["meta"]["applied"]) == (step, step)
        assert_same(stores, source)
        assert read_model(path)[0] == verify_checkpoint(path) == state


def test_each_process_writes_its_elements_only(saved):
    path, source = saved
    for index, state in enumerate(source.units):
        found = {}
        for file in (path / "units").glob(f"{index:05}-*"):
            part = re.search(r"\.elements-(\d+)-(\d+)$", file.stem)
            start, stop = map(int, part.groups()) if part else (0, state.unit.numel)
            tensors, found[start] = load_file(file), stop
            expected = state.moments | {"param": state.params[0], "previous": state.params[1]}
            expected["remainder"] = state.remainder
            assert tensors.keys() == expected.keys()
            for name, full in expected.items():
                assert torch.equal(tensors[name].view(torch.uint8), full[start:stop].view(torch.uint8))
        assert len(found) == min(state.unit.numel // BLOCK, 4)
        assert sorted(found) == [0, *sorted(found.values())[:-1]] and max(found.values()) == state.unit.numel
    assert not [*path.parent.glob(".*")]


def test_units_are_released_also_where_nothing_of_them_is_saved(tmp_path, model_dir):
    stores = divided("bfloat16", 4, whole("bfloat16"))
    released = [[] for _ in stores]
    assert any(state.own.start == state.own.stop for store in stores for state in store.units)
    calls = {rank: {"background": Background(release=each.append)} for rank, each in enumerate(released)}
    save(stores, tmp_path / "c", model_dir, calls=calls)
    assert [sorted(each) for each in released] == [[*range(len(stores[0].units))]] * 4


def test_a_single_process_writes_whole_files(tmp_path, model_dir):
    source = whole("fp8")
    one = checkpoint_of([source], tmp_path / "one", model_dir)
    other = checkpoint_of(divided("fp8", 1, source), tmp_path / "divided", model_dir)
    content = [{file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()} for path in (one, other)]
    assert content[0] == content[1]
    assert len([*one.glob("units/*")]) == len(source.units) and not [*one.glob("units/*.elements-*")]
    assert not any("start_sha256" in entry for entry in json.loads((one / MANIFEST).read_text())["files"].values())


@pytest.mark.parametrize(("at", "found"), [(0.01, 4), (0.1, 4), (0.9, 1)], ids=["header", "weights", "moments"])
def test_a_damaged_part_is_named_where_it_is_read(saved, damage, at, found):
    path, _ = saved
    file = sorted((path / "units").glob("00001-*"))[2]
    damage(file, at)
    errors = []
    for store in divided("bfloat16", 4):
        try:
            load_state(path, store.units)
        except Damaged as error:
            errors.append(str(error))
    assert len(errors) == found and all(f"{file.name} is damaged" in error for error in errors)
    (store,) = divided("bfloat16", 1)
    with pytest.raises(Damaged, match=f"{file.name} is damaged"):
        load_state(path, store.units)


@pytest.mark.parametrize(("error", "others"), [(Damaged("a is damaged"), Damaged), (OSError("broken"), OtherFailed)])
def test_an_error_in_one_process_ends_the_block_in_all(error, others):
    meeting = Meeting(3)

    def block(rank):
        with Processes(rank, partial(meeting.gather, rank), "host-{}".format).together():
            if rank == 1:
                raise error
            return rank

    with ThreadPoolExecutor(3) as pool:
        first, second, third = [pool.submit(block, rank) for rank in range(3)]
    assert second.exception() is error
    for future in (first, third):
        assert type(future.exception()) is others
        assert str(future.exception()) == f"host-1 has failed: {error}"


def test_a_hash_of_the_start_that_is_wrong_or_missing(saved):
    path, source = saved

    def change(edit):
        manifest = json.loads((path / MANIFEST).read_text())
        for entry in manifest["files"].values():
            if "start_sha256" in entry:
                edit(entry)
        (path / MANIFEST).write_text(json.dumps(manifest))

    stores = divided("bfloat16", 3, seed=1)
    change(lambda entry: entry.update(start_sha256=None))
    with pytest.raises(Damaged, match="its content is not what was saved"):
        load_state(path, stores[0].units)
    change(lambda entry: entry.pop("start_sha256"))
    for store in stores:  # reads whole files
        load_state(path, store.units)
    assert_same(stores, source)


def fail(error):
    raise error


FAILURES = {
    "first": {0: {"background": Background(proceed=lambda: fail(DiskFull("no room")))}},
    "other": {2: {"background": Background(proceed=lambda: fail(DiskFull("no room")))}},
    "release": {1: {"background": Background(release=lambda unit: fail(RuntimeError("broken")))}},
}


@pytest.mark.parametrize("calls", FAILURES.values(), ids=FAILURES)
def test_a_failure_of_one_process_leaves_no_checkpoint(tmp_path, model_dir, calls):
    ((failed, _),) = calls.items()
    stores = divided("bfloat16", 4, whole("bfloat16"))
    errors = save(stores, tmp_path / "c", model_dir, calls=calls)
    for rank, error in enumerate(errors):
        if rank == failed:
            assert isinstance(error, DiskFull | RuntimeError)
        else:
            assert isinstance(error, OtherFailed)
            assert str(error).startswith(f"process {failed} has failed: ")
    assert not [*(tmp_path / "c").iterdir()]
    assert complete_checkpoints(tmp_path / "c") == []
    checkpoint_of(stores, tmp_path / "c", model_dir)


def test_a_failure_of_the_first_process_at_the_start_or_the_end_reaches_all(tmp_path, model_dir, monkeypatch):
    stores, folder = divided("bfloat16", 3, whole("bfloat16")), tmp_path / "c"
    before = checkpoint_of(stores, folder, model_dir, step=6)

    def assert_failed(message):
        first, *others = save(stores, folder, model_dir)
        assert message in str(first) and not isinstance(first, OtherFailed)
        assert all(isinstance(error, OtherFailed) and message in str(error) for error in others)
        assert complete_checkpoints(folder) == [before]

    blocked = folder / ".checkpoint-7.rptrain-partial"
    blocked.write_text("mine")
    assert_failed("is in the way")
    assert blocked.read_text() == "mine"
    blocked.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Aside, "seal", lambda *_: fail(DiskFull("no room")))
        assert_failed("no room")
    (model_dir / "config.json").unlink()
    assert_failed("config.json")
    assert [*folder.iterdir()] == [before]


def test_an_exchange_that_fails_leaves_no_checkpoint(tmp_path, model_dir):
    stores, folder = divided("bfloat16", 3, whole("bfloat16")), tmp_path / "c"
    complete = []
    for lost in range(20):
        results = save(stores, folder, model_dir, lost=lost)
        complete.append(complete_checkpoints(folder))
        if results == [folder / "checkpoint-7"] * 3:
            break
        assert all(isinstance(error, Lost) for error in results)
    *before, renamed, last = complete
    assert before == [[]] * 7 and renamed == last == [folder / "checkpoint-7"]  # it is not told that the others have
    verify_checkpoint(last[0])
    assert [each.name for each in folder.iterdir()] == ["checkpoint-7"]


def test_a_file_that_is_deleted_before_the_end_leaves_no_checkpoint(tmp_path, model_dir):
    """Its size and hash are known, but the directory is not complete."""
    stores, folder = divided("bfloat16", 3, whole("bfloat16")), tmp_path / "c"

    def exchange(gather, value):
        found, (rank,) = gather(value), gather.args
        written = isinstance(value, dict) and all("sha256" in entry for entry in value.values())
        if written and rank == 0:  # which goes on to delete the directory, so that the others would be too late
            next(folder.glob(".*/*/units/00001-*")).unlink()
        return found

    errors = save(stores, folder, model_dir, exchange=exchange)
    assert all(isinstance(error, Damaged) and "is missing" in str(error) for error in errors)
    assert not [*folder.iterdir()]


def test_a_lost_process_does_not_write_into_a_later_directory(tmp_path):
    target = tmp_path / "a"
    with pytest.raises(FileNotFoundError), written_aside(target, {}, 0) as first:
        lost = Aside.of(target, first.path.name)
        lost.write("one", [b"lost"])
        with written_aside(target, {}, 0) as second:  # of processes that were started again
            second.write("two", [b"second"])
            with pytest.raises(FileNotFoundError):
                lost.write("two", [b"lost"])
    assert {file.name for file in target.iterdir()} == {"two", MANIFEST}
    assert (target / "two").read_bytes() == b"second"


def rehash(path, *names):
    """Writes the sizes and hashes of files as they are into the manifest."""
    manifest = json.loads((path / MANIFEST).read_text())
    for name in names:
        data = (path / name).read_bytes()
        manifest["files"][name] |= {"size": len(data), "sha256": sha256(data).hexdigest()}
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture
def edited(saved):
    """Gives a part another name, in all files that name it."""
    path, _ = saved
    names = sorted(json.loads((path / STATE).read_text())["units"])
    parts = sorted((name for name in names if "/00001-" in name), key=lambda name: int(name.split("-")[-2]))

    def edit(part, start, stop):
        before = parts[part]
        after = None if start is None else f"{before.split('.elements')[0]}.elements-{start}-{stop}.safetensors"
        state, manifest = (json.loads((path / name).read_text()) for name in (STATE, MANIFEST))
        for files in (state["units"], manifest["files"]):
            content = files.pop(before)
            if after:
                files[after] = content
        if after:
            (path / before).rename(path / after)
        (path / STATE).write_text(json.dumps(state))
        (path / MANIFEST).write_text(json.dumps(manifest))
        rehash(path, STATE)
        return path

    ranges = [[int(number) for number in name.removesuffix(".safetensors").split("-")[-2:]] for name in parts]
    return edit, ranges


@pytest.mark.parametrize(
    "change",
    [
        lambda edit, ranges: edit(1, ranges[1][0] - BLOCK, ranges[1][1]),
        lambda edit, ranges: edit(1, ranges[1][0] + BLOCK, ranges[1][1]),
        lambda edit, ranges: edit(3, ranges[3][0], ranges[3][1] + BLOCK),
        lambda edit, ranges: edit(3, ranges[3][0], ranges[3][1] - BLOCK),
        lambda edit, ranges: edit(1, ranges[1][0], ranges[1][0]),
        lambda edit, ranges: edit(1, ranges[1][1], ranges[1][0]),
        lambda edit, ranges: edit(0, None, None),
        lambda edit, ranges: edit(1, None, None),
        lambda edit, ranges: edit(3, None, None),
    ],
    ids=["overlap", "gap", "beyond", "short", "empty", "backwards", "first", "middle", "last"],
)
def test_parts_that_do_not_make_a_unit(edited, change):
    path = change(*edited)
    with pytest.raises(
        Damaged, match=r"checkpoint-7 is damaged: units/00001-\S+ should (begin with element|end with the last)"
    ):
        read_model(path)
    (store,) = divided("bfloat16", 1)
    with pytest.raises(Damaged, match=r"should (begin|end) with"):
        load_state(path, store.units)


def test_a_part_of_other_length_than_its_name_says(edited):
    edit, ranges = edited
    edit(1, ranges[1][0], ranges[1][1] + BLOCK)
    path = edit(2, ranges[2][0] + BLOCK, ranges[2][1])
    with pytest.raises(Damaged, match="does not belong to the model of"):
        read_model(path)


def test_only_the_first_part_has_weights_of_the_wire_format(tmp_path, model_dir):
    path = checkpoint_of(divided("fp8", 4, whole("fp8")), tmp_path / "checkpoints", model_dir)
    state = json.loads((path / STATE).read_text())
    name = max(name for name in state["units"] if "/00001-" in name)
    tensors = load_file(path / name)
    assert len(tensors["previous"]) == 0
    ordered = {key: tensors[key] for key in state["units"][name]} | {"previous": torch.ones(8, dtype=torch.uint8)}
    layout = file_layout({key: (tensor.dtype, len(tensor)) for key, tensor in ordered.items()})
    (path / name).write_bytes(header(layout) + b"".join(map(as_bytes, ordered.values())))
    state["units"][name] = layout
    (path / STATE).write_text(json.dumps(state))
    rehash(path, STATE, name)
    with pytest.raises(Damaged, match="does not belong to the model of"):
        read_model(path)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "fp8"])
def test_the_export_is_that_of_a_single_process(tmp_path, model_dir, kind):
    source = whole(kind)
    for state in source.units:  # finite masters
        for rest in (state.remainder, state.masters):
            if rest is not None:
                rest.zero_() if rest is state.remainder else rest.copy_(state.params[0])
    exported = {}
    for world in (1, 3):
        path = checkpoint_of(divided(kind, world, source), tmp_path / f"c{world}", model_dir)
        for dtype in (None, "float32"):
            folder = export(path, tmp_path / f"{world}-{dtype}", dtype)
            exported.setdefault(dtype, []).append((folder / "model.safetensors").read_bytes())
    assert all(one == three for one, three in exported.values())


def test_prune_deletes_divided_checkpoints(saved, model_dir):
    path, source = saved
    checkpoint_of(divided("bfloat16", 2, source), path.parent, model_dir, step=9)
    prune(path.parent, 1)
    assert [each.name for each in path.parent.iterdir()] == ["checkpoint-9"]
