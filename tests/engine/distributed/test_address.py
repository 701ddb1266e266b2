"""Which addresses a process tells the others."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from rptrain.engine.distributed.address import common, own_addresses, reachable, resolved, with_interface
from rptrain.utils.errors import UserError

LOOP = {"IPv4": ["127.0.0.1"]}
LOOPS = LOOP | {"IPv6": ["::1"]}
FOUR, SIX = {"IPv4": ["10.0.0.2"]}, {"IPv6": ["fd00::2"]}


def test_the_interface_to_the_first_process_is_taken():
    """Whatever the machine's own name stands for. Nothing is sent, and nothing has to listen."""
    assert own_addresses("127.0.0.1", "") == {"IPv4": ("127.0.0.1",)}
    assert own_addresses("fe80::1", "") == {}  # a link-local address without its link
    (loopback,) = (name for name, each in psutil.net_if_addrs().items() if "127.0.0.1" in {one.address for one in each})
    assert own_addresses("no-such-host", loopback)["IPv4"] == ["127.0.0.1"]
    assert with_interface("127.0.0.1") == f"127.0.0.1 ({loopback})" and with_interface("192.0.2.99") == "192.0.2.99"
    with pytest.raises(UserError, match=f"=\\^docker0: .* has no interface '\\^docker0'. Set it to .*{loopback}"):
        own_addresses("127.0.0.1", "^docker0")


def test_of_an_interface_addresses_that_other_machines_understand_are_taken(monkeypatch):
    def of(number, *addresses):
        return [SimpleNamespace(family=number, address=address) for address in addresses]

    several = of(socket.AF_INET6, "fe80::1%a", "fd00::1", "fd00::3") + of(socket.AF_PACKET, "02:00:00:00:00:01")
    there = {"a": several, "b": of(socket.AF_INET, "10.0.0.1") + of(socket.AF_INET6, "fe80::2%b"), "c": []}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    assert own_addresses("127.0.0.1", "a,b") == {"IPv4": ["10.0.0.1"], "IPv6": ["fd00::1"]}
    assert own_addresses("127.0.0.1", "c") == {}


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (LOOPS, [LOOPS, LOOP], LOOPS),
        (FOUR, [LOOP, FOUR], FOUR),
        (LOOPS, [FOUR], {"IPv4": ["here to 10.0.0.2"]}),
        (LOOP, [LOOP, SIX], {"IPv6": ["here to fd00::2"]}),
        (FOUR | {"IPv6": ["::1"]}, [FOUR | SIX], FOUR | {"IPv6": ["here to fd00::2"]}),
        ({}, [FOUR], {"IPv4": ["here to 10.0.0.2"]}),
    ],
    ids=["one-machine", "known", "own-name", "own-name-ipv6", "both", "unknown"],
)
def test_loopback_addresses_stay_on_one_machine(monkeypatch, own, others, expected):
    """The first process may know its machine by a name that stands for a loopback address."""
    monkeypatch.setattr("rptrain.engine.distributed.address._toward", lambda host, family: f"here to {host}")
    assert reachable(own, [own, *others]) == expected


def test_all_listen_in_one_family():
    assert common([LOOPS, LOOPS]) == "IPv4" and common([FOUR | SIX, SIX]) == "IPv6" and common([FOUR, SIX]) == ""


def test_names_in_messages_have_their_addresses(monkeypatch):
    assert resolved("127.0.0.1") == "" and "127.0.0.1" in resolved("localhost")

    def getaddrinfo(host, *given, **named):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert resolved("no-such-host").startswith("this name has no address: ")
