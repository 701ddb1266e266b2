"""The nodes of `rptrain plan --nodes 4 --network 10GbE`, and the network between them."""

import re
from dataclasses import dataclass
from typing import Self

from rptrain.utils.errors import UserError
from rptrain.utils.text import quoted
from rptrain.utils.units import parse_rate

MOST_NODES = 1024
RATES = 1e5, 1e13  # bytes per second of networks that are possible
EXAMPLE = "such as 1GbE, 10GbE, 25GbE or 100GbE, or a rate such as 10Gb/s or 1.2GB/s"


@dataclass(frozen=True)
class Nodes:
    """Equal machines that train one model, with a process each, and the rate of the network between them.

    Each machine can send and receive at this rate at the same time, whatever the others do.
    """

    count: int
    network: str  # as given
    rate: float  # bytes per second in each direction

    @classmethod
    def of(cls, nodes: int | None, network: str | None) -> Self | None:
        """The nodes that --nodes and --network describe; None for one node. Raises UserError with all mistakes."""
        mistakes = []
        if nodes is not None and not 1 <= nodes <= MOST_NODES:
            mistakes.append(f"--nodes must be from 1 to {MOST_NODES}, not {nodes}")
        elif network is None and nodes is not None and nodes > 1:
            mistakes.append(f"--nodes {nodes} needs --network, the network between the nodes, {EXAMPLE}")
        elif network is not None and nodes in (None, 1):
            mistakes.append("--network is the network between several nodes: add --nodes, e.g. --nodes 4")
        rate = None if network is None else _rate(network)
        if network is not None and (rate is None or not RATES[0] <= rate <= RATES[1]):
            mistakes.append(f"--network must be a name {EXAMPLE}, not {quoted(repr(network))}")
        if mistakes:
            raise UserError("\n".join(mistakes))
        return None if nodes in (None, 1) or network is None or rate is None else cls(nodes, network.strip(), rate)


def _rate(network: str) -> float | None:
    """Bytes per second in each direction; None if the text is neither a name nor a rate."""
    ethernet = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)GbE", network.strip(), re.IGNORECASE)
    return float(ethernet[1]) * 1e9 / 8 if ethernet else parse_rate(network)
