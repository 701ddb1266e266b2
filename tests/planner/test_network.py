"""The flags --nodes and --network."""

import pytest

from rptrain.planner.network import Nodes
from rptrain.utils.errors import UserError


@pytest.mark.parametrize(
    ("network", "rate"),
    [("1GbE", 125e6), ("10gbe", 1.25e9), ("2.5GbE", 312.5e6), ("100GbE ", 12.5e9), ("10Gb/s", 1.25e9), ("1GB/s", 1e9)],
)
def test_names_and_rates(network, rate):
    assert Nodes.of(4, network) == Nodes(4, network.strip(), rate)


def test_one_node_has_no_network():
    assert Nodes.of(None, None) is None and Nodes.of(1, None) is None


@pytest.mark.parametrize(
    ("nodes", "network", "said"),
    [
        (0, None, "--nodes must be from 1 to 1024, not 0"),
        (-3, "10GbE", "--nodes must be from 1 to 1024, not -3"),
        (1025, "10GbE", "--nodes must be from 1 to 1024, not 1025"),
        (4, None, "--nodes 4 needs --network, the network between the nodes, such as 1GbE,"),
        (None, "10GbE", "--network is the network between several nodes: add --nodes"),
        (1, "10GbE", "--network is the network between several nodes: add --nodes"),
        (
            2,
            "fast",
            "--network must be a name such as 1GbE, 10GbE, 25GbE or 100GbE, or a rate such as 10Gb/s or 1.2GB/s",
        ),
        (2, "", "not ''"),
        (2, "0GbE", "not '0GbE'"),
        (2, "10Gb", "not '10Gb'"),
        (2, "999999999TB/s", "not '999999999TB/s'"),
        (2, "x" * 500, "not 'xxx"),
    ],
)
def test_mistakes(nodes, network, said):
    with pytest.raises(UserError) as caught:
        Nodes.of(nodes, network)
    assert said in str(caught.value) and len(str(caught.value)) < 400


def test_all_mistakes_are_named_at_once():
    with pytest.raises(UserError) as caught:
        Nodes.of(0, "fast")
    assert len(str(caught.value).splitlines()) == 2
