"""Network namespaces of this machine, joined by a link whose rate is limited in both directions."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TOOLS = ("ip", "tc")
BURST = 0.002  # seconds of the rate that a token bucket holds
SEGMENTS = 128 << 10  # bytes that a bucket holds at least: two of the largest segments
QUEUE = "50ms"  # of packets that wait for tokens


@dataclass(frozen=True)
class Side:
    """One of the two ends of the link."""

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]


SIDES = tuple(Side(f"net{os.getpid()}-{rank}", f"side{rank}", f"10.199.0.{rank + 1}") for rank in range(2))


class Unavailable(RuntimeError):
    """Namespaces or limited links do not exist here."""


@contextmanager
def joined() -> Iterator[tuple[Side, ...]]:
    """Creates the namespaces, and deletes them at the end. Raises Unavailable."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise Unavailable(f"this needs root, and {' and '.join(TOOLS)} of iproute2")
    for side in SIDES:
        _call("ip", "netns", "add", side.namespace)
    try:
        one, other = SIDES
        pair = ["type", "veth", "peer", "name", other.interface, "netns", other.namespace]
        _call("ip", "-n", one.namespace, "link", "add", one.interface, *pair)
        for side in SIDES:
            _call("ip", "-n", side.namespace, "address", "add", f"{side.address}/24", "dev", side.interface)
            for interface in (side.interface, "lo"):
                _call("ip", "-n", side.namespace, "link", "set", interface, "up")
        yield SIDES
    finally:
        for side in SIDES:
            _call("ip", "netns", "delete", side.namespace)


def limit(rate: float | None) -> None:
    """Limits what each side sends to `rate` bytes per second; None: not at all."""
    for side in SIDES:
        device = ["dev", side.interface, "root"]
        if rate is None:
            subprocess.run(["tc", "-n", side.namespace, "qdisc", "delete", *device], capture_output=True, check=False)
        else:
            burst = max(SEGMENTS, round(BURST * rate))
            tbf = ["tbf", "rate", f"{rate * 8:.0f}bit", "burst", str(burst), "latency", QUEUE]
            _call("tc", "-n", side.namespace, "qdisc", "replace", *device, *tbf)


def set_link(side: Side, *, up: bool) -> None:
    """Connects a side, or cuts its link: what is sent is then lost."""
    _call("ip", "-n", side.namespace, "link", "set", side.interface, "up" if up else "down")


def _call(*command: str) -> None:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise Unavailable(f"{' '.join(command)}: {found.stderr.strip()}")
