"""How processes meet, and what they say if they cannot. Here they are threads with connections of their own."""

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from benchmarks.network import namespaces
from rptrain.engine.distributed import meeting, rendezvous
from rptrain.engine.distributed.address import SETTING
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.peers import Peers
from rptrain.engine.distributed.rendezvous import dist, value
from rptrain.engine.distributed.versions import versions
from rptrain.utils.errors import UserError
from tests import run_tools as tools

HOST = socket.gethostname()
ALIKE = {"rptrain": "1.0", "torch": "2.13.0", "CUDA": "13.0", "triton": "3.9.0"}
own_versions = threading.local()


def refused(*calls):
    """The UserError of each call, which gets a port, in threads that begin at once. They share a store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    errors: dict[int, str] = {}

    def one(number, call):
        with pytest.raises(UserError) as raised:
            call(store.port)
        errors[number] = str(raised.value)

    threads = [threading.Thread(target=one, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(tools.PATIENCE)
    return [errors[number] for number in range(len(calls))]


def meeting_as(rank, world, found, port):
    own_versions.found = found
    meeting.meet(Launch(rank, world, rank, world, "127.0.0.1", port))


@pytest.fixture
def of_threads(monkeypatch):
    monkeypatch.setattr(meeting, "versions", lambda: own_versions.found)


def test_other_versions_are_refused_by_all_and_named(of_threads):
    others = [ALIKE, ALIKE | {"torch": "2.12.1", "rptrain": "1.1"}, ALIKE]
    errors = refused(*[partial(meeting_as, rank, 3, found) for rank, found in enumerate(others)])
    assert {*errors} == {
        "the processes need equal versions, but have "
        f"rptrain 1.0 in process 0 on {HOST} and process 2 on {HOST}, 1.1 in process 1 on {HOST}; "
        f"torch 2.13.0 in process 0 on {HOST} and process 2 on {HOST}, 2.12.1 in process 1 on {HOST}. "
        "Install the same versions on all machines"
    }


def test_versions_of_rptrain_that_say_nothing_are_refused(of_threads):
    def earlier(port):
        joining = dist.PrefixStore("rptrain", dist.TCPStore("127.0.0.1", port, is_master=False))
        joining.set("join/1", "me")
        tools.wait_for(lambda: "me" in value(joining, "roster"))
        prefix, _ = json.loads(joining.get("roster"))
        joining.set("found/1", prefix)
        dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False)).set("name/1", "there")
        raise UserError("")

    error, _ = refused(partial(meeting_as, 0, 2, ALIKE), earlier)
    assert f"rptrain 1.0 in process 0 on {HOST}, unknown in process 1 on there" in error


def test_versions_count_what_changes_bits():
    assert versions().keys() == ALIKE.keys()
    assert versions()["rptrain"].startswith("0.") and versions()["torch"].startswith("2.")


@pytest.mark.parametrize(
    ("launches", "expected"),
    [
        ([(0, 4), (2, 4)], ["processes 1, 3 of 4 have not come to 127.0.0.1:"] * 2),
        ([(1, 2)], ["process 0 of 2 has not come to 127.0.0.1:"]),
        ([(0, 2), (1, 3)], ["process 1 of 2 has not", "WORLD_SIZE is 2 for process 0, but 3 for process 1"]),
    ],
    ids=["absent", "first-absent", "world-size"],
)
def test_who_has_not_come_is_named(monkeypatch, of_threads, launches, expected):
    monkeypatch.setattr(rendezvous, "CONNECTING", 0.5)
    found = refused(*[partial(meeting_as, rank, world, ALIKE) for rank, world in launches])
    assert all(error.startswith(start) for error, start in zip(found, expected, strict=True)), found


def test_a_rank_that_is_taken_is_named(monkeypatch, of_threads):
    """The first of two processes meets the others; the second one comes while they go on."""
    monkeypatch.setattr(rendezvous, "CONNECTING", 0.5)

    def second(port):
        joining = dist.PrefixStore("rptrain", dist.TCPStore("127.0.0.1", port, is_master=False))
        joining.set("roster", '["first", "another"]')
        meeting_as(1, 2, ALIKE, port)

    (error,) = refused(second)
    assert error.startswith("another process has RANK=1, too. ")


def test_a_store_that_cannot_be_there_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = Launch(0, 2, 0, 2, "127.0.0.1", port, hosts=True)
        with pytest.raises(UserError, match=f"process 0 on .* cannot listen at 127.0.0.1:{port} .* MASTER_PORT a free"):
            Peers(launch)
    for name in ("CONNECTING", "ANSWER"):
        monkeypatch.setattr(rendezvous, name, 0.2)
    with pytest.raises(UserError, match=f"process 1 on .* cannot reach 127.0.0.1:{port}, where the .*: check that pro"):
        meeting.open_store(Launch(1, 2, 1, 2, "127.0.0.1", port))


def test_an_address_that_does_not_work_is_named(monkeypatch):
    """With the setting that replaces it."""
    monkeypatch.setattr(meeting, "own_addresses", lambda host, interfaces: {"IPv4": ["203.0.113.7"]})

    def channel(rank, port):
        with Peers(Launch(rank, 2, rank, 2, "127.0.0.1", port)) as peers:
            peers.channel()

    for error in refused(partial(channel, 0), partial(channel, 1)):
        assert f"process 0 on {HOST} listens at 203.0.113.7, process 1 on {HOST} listens at 203.0.113.7 (" in error
        assert f"set {SETTING} on each" in error


def test_an_interface_that_does_not_exist_is_named_by_all(monkeypatch, of_threads):
    monkeypatch.setenv(SETTING, "^lo")
    errors = refused(*[partial(meeting_as, rank, 2, ALIKE) for rank in range(2)])
    assert errors[0] == errors[1] and f"process 1 on {HOST}: {SETTING}=^lo: {HOST} has no interface '^lo'" in errors[0]


PROGRAM = """
import sys
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.peers import Peers

rank, host = int(sys.argv[1]), sys.argv[2]
with Peers(Launch(rank, 2, 0, 1, host, 29872, hosts=True)) as peers:
    print(peers.channel().gather(peers.place))
"""


@pytest.mark.long
def test_machines_whose_own_names_are_loopback_addresses_meet(tmp_path: Path):
    """As on Debian. Two network namespaces stand for them."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {HOST}\n")
    bound = 'mount --bind "$0" /etc/hosts && exec "$@"'  # in the mount namespace that `ip netns exec` makes
    try:
        with namespaces.joined() as sides:
            masters = [HOST, sides[0].address]
            lines = [[sys.executable, "-c", PROGRAM, str(rank), host] for rank, host in enumerate(masters)]
            started = [
                subprocess.Popen(
                    side.command("sh", "-c", bound, str(hosts), *line),
                    stdout=subprocess.PIPE,
                    text=True,
                    env={name: each for name, each in os.environ.items() if name != SETTING},
                )
                for side, line in zip(sides, lines, strict=True)
            ]
            found = [process.communicate(timeout=tools.PATIENCE)[0] for process in started]
    except namespaces.Unavailable as reason:
        pytest.skip(str(reason))
    places = [f"{side.address} ({side.interface})" for side in sides]
    assert found == [f"{places}\n"] * 2
