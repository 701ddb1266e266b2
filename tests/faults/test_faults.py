"""Some cases of the table of faults: every kind of error, on threads of the engine, of a save and of what observes."""

from collections.abc import Iterator

import pytest

from rptrain.utils.native_watchdog import NativeWatchdog
from tests.cases import grid, long
from tests.faults.cases import Case, Server, Table, main

needs_compiler = pytest.mark.skipif(NativeWatchdog.load() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(tmp_path_factory.mktemp("faults"), busy=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.parametrize(
    "case",
    [
        long(Case("backward", "raises", "middle", "async")),
        long(Case("download", "mute", "first", "async")),
        long(Case("optimizer", "exits", "last", "async")),
        long(Case("fsync", "mute", "middle", "async")),
        grid(Case("fsync", "exits", "first", "async")),
        grid(Case("tracker log", "exits", "first", "async")),
        long(Case("telemetry", "mute", "first", "async")),
        grid(Case("validation", "exits", "first", "sync")),
        grid(Case("saver", "sleeps", "last", "sync")),
        grid(Case("tracker close", "sleeps", "once", "sync")),
        pytest.param(Case("forward", "holds", "middle", "sync"), marks=[pytest.mark.long, needs_compiler]),
    ],
    ids=lambda case: "-".join((case.place.replace(" ", "_"), case.kind, case.when, case.update)),
)
def test_a_fault_ends_the_process_or_only_what_it_is_in(table, server, case):
    assert table.run(server, case).problems == ()


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_case(tmp_path):
    assert main(tmp_path / "faults.json", ()) == 0
