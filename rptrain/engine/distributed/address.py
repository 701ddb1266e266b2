"""The addresses at which the other processes reach this one.

Gloo's own choice is the address of the machine's name, which Debian makes a loopback address: 127.0.1.1.
"""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import psutil

from rptrain.utils.errors import UserError

SETTING = "GLOO_SOCKET_IFNAME"  # of torch: one interface, or several with commas between them
FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}
ANY_PORT = 9  # of the address to which nothing is sent

Addresses = Mapping[str, Sequence[str]]  # by the name of their family, the preferred family first


def own_addresses(host: str, interfaces: str) -> Addresses:
    """Those of the interfaces that SETTING names, or else of the interface that leads to `host`.

    UserError if a name is not that of an interface.
    """
    if interfaces:
        return _of_interfaces(interfaces)
    found = {family: _toward(host, family) for family in FAMILIES}
    return {family: (address,) for family, address in found.items() if address}


def reachable(own: Addresses, everyone: Sequence[Addresses]) -> Addresses:
    """A process's addresses as the others reach them.

    If all have loopback addresses alone, they are on one machine, and these stay. Otherwise a loopback address is
    replaced by that of the interface that leads to a process with another address.
    """
    remote = {family: each[0] for addresses in everyone for family, each in addresses.items() if not _loops(each[0])}
    if not remote:
        return own
    found = {family: [address for address in own.get(family, ()) if not _loops(address)] for family in remote}
    found = {family: known or [_toward(remote[family], family)] for family, known in found.items()}
    return {family: known for family, known in found.items() if known[0]}


def common(everyone: Sequence[Addresses]) -> str:
    """The first family in which all processes have an address; "" if there is none."""
    return next((family for family in FAMILIES if all(family in each for each in everyone)), "")


def with_interface(address: str) -> str:
    """The address and the interface that has it, if it is known."""
    names = [name for name, each in psutil.net_if_addrs().items() if address in (one.address for one in each)]
    return f"{address} ({', '.join(names)})" if names else address


def resolved(host: str) -> str:
    """The addresses of a name, or why it has none; "" for a numeric address."""
    try:
        found = {str(each[4][0]): None for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return f"this name has no address: {error.strerror}"
    return "" if [*found] == [host] else ", ".join(found)


def _of_interfaces(interfaces: str) -> Addresses:
    there = psutil.net_if_addrs()
    names = interfaces.split(",")
    if unknown := [name for name in names if name not in there]:
        raise UserError(
            f"{SETTING}={interfaces}: {socket.gethostname()} has no interface {', '.join(map(repr, unknown))}. "
            f"Set it to one of {', '.join(there)}"
        )
    found = {family: [_of(there[name], number) for name in names] for family, number in FAMILIES.items()}
    return {family: known for family, each in found.items() if (known := [address for address in each if address])}


def _of(addresses: Sequence[Any], number: int) -> str:
    """The first address of a family; "" if there is none."""
    return next((each.address for each in addresses if each.family == number and _routable(each.address)), "")


def _toward(host: str, family: str) -> str:
    """The address from which this machine would send to another; "" if it cannot. Sends nothing."""
    with suppress(OSError), socket.socket(FAMILIES[family], socket.SOCK_DGRAM) as probe:
        probe.connect((host, ANY_PORT))
        address = probe.getsockname()[0]
        return address if _routable(address) else ""
    return ""


def _routable(address: str) -> bool:
    """False for link-local addresses of IPv6, which mean another machine on each link."""
    return not (":" in address and ip_address(address).is_link_local)


def _loops(address: str) -> bool:
    return ip_address(address).is_loopback
