"""Listeners publish an address that the job's other nodes reach, on the interface the user named."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.rank import addresses as addresses_module
from megatron_rl.rank.addresses import address_towards, node_names, own_address, pin_gloo_interface
from megatron_rl.recipe.errors import ConfigurationError

INTERFACES = {"lo": "127.0.0.1", "eno1": "10.0.0.5", "eth0": "10.1.0.5", "eth1": "10.2.0.5", "docker0": "172.17.0.1"}
DOWN = "eth1"


@pytest.fixture
def node(monkeypatch):
    """Factory of a node with INTERFACES, given its name's address and the job's environment."""
    addresses = {
        name: [
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1"),
            SimpleNamespace(family=socket.AF_INET, address=at),
        ]
        for name, at in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != DOWN) for name in addresses}
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu07")
    for variable in [name for name in os.environ if name.startswith("SLURM") or name.endswith("SOCKET_IFNAME")]:
        monkeypatch.delenv(variable)

    def node(name_means: str | None, routes: dict[str, str] | None = None, **environment: str) -> None:
        def resolve(name: str) -> str:
            if name != environment.get("SLURMD_NODENAME", "gpu07") or name_means is None:
                raise socket.gaierror(name)
            return name_means

        monkeypatch.setattr(socket, "gethostbyname", resolve)
        monkeypatch.setattr(addresses_module, "address_towards", (routes or {}).get)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)

    return node


TWO = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURMD_NODENAME": "gpu07"}


def test_the_address_of_the_nodes_name_is_used(node):
    node("10.0.0.5", **TWO)
    assert own_address() == "10.0.0.5"


def test_an_interface_that_appears_during_the_look_is_left_out(node, monkeypatch):
    node("10.0.0.5", **TWO, NCCL_SOCKET_IFNAME="eno")
    known = psutil.net_if_stats()
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eno1": known["eno1"]})
    assert own_address() == "10.0.0.5"


def test_a_single_node_may_use_loopback(node):
    node("127.0.1.1")
    assert own_address() == "127.0.1.1"
    node(None)
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize("name_means", ["127.0.1.1", None])
def test_the_route_to_another_node_replaces_a_loopback_name(node, name_means):
    node(name_means, {"10.1.0.1": "10.1.0.5"}, **TWO, SLURM_LAUNCH_NODE_IPADDR="10.1.0.1")
    assert own_address() == "10.1.0.5"


def test_a_step_launched_over_loopback_uses_the_route_to_a_neighbour(node):
    routes = {"127.0.0.1": "127.0.0.1", "gpu07": "127.0.1.1", "gpu08": "10.0.0.5"}
    node("127.0.1.1", routes, **TWO, SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
    assert own_address() == "10.0.0.5"


def test_nodes_on_one_machine_meet_on_loopback(node):
    node("127.0.0.1", {"127.0.0.1": "127.0.0.1", "gpu08": "127.0.0.1"}, **TWO, SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
    assert own_address() == "127.0.0.1"


def test_an_unreachable_address_is_refused_with_a_remedy(node):
    node("127.0.1.1", **TWO)
    with pytest.raises(
        ConfigurationError, match=r"gpu07 does not know .* Set NCCL_SOCKET_IFNAME in the cluster profile"
    ):
        own_address()


@pytest.mark.parametrize(
    ("names", "address"),
    [
        ("eth0", "10.1.0.5"),
        ("eth", "10.1.0.5"),  # prefix; eth1 is down
        ("^lo,docker,eno", "10.1.0.5"),
        ("^lo,docker", "10.0.0.5"),  # the address of the node's name is preferred among the rest
        ("ib", "10.0.0.5"),  # no such interface: the library itself will report it
        ("lo", "10.0.0.5"),
    ],
)
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_the_users_interface_is_preferred(node, variable, names, address):
    node("10.0.0.5", **TWO, **{variable: names})
    assert own_address() == address


def test_gloos_own_variable_overrides_nccls(node):
    node("127.0.1.1", **TWO, GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eno1")
    assert own_address() == "10.1.0.5"


@pytest.mark.parametrize(
    ("name_means", "address", "interface"),
    [
        ("127.0.1.1", "10.1.0.5", "eth0"),
        (None, "10.1.0.5", "eth0"),
        ("10.0.0.5", "10.1.0.5", None),  # the name is right
        ("127.0.1.1", "127.0.0.1", None),  # all ranks are on this node
        ("127.0.1.1", None, None),
    ],
)
def test_gloo_gets_the_interface_if_the_nodes_name_is_wrong(node, monkeypatch, name_means, address, interface):
    node(name_means, **TWO)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # restored afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    pin_gloo_interface(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_the_users_interface_of_gloo_stays(node):
    node("127.0.1.1", **TWO, GLOO_SOCKET_IFNAME="eno1")
    pin_gloo_interface("10.1.0.5")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eno1"


def test_the_route_to_this_node_is_known_and_an_unknown_host_has_none():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") is None


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("", []),
        ("gpu7", ["gpu7"]),
        ("gpu[08-10,1],login", ["gpu08", "gpu09", "gpu10", "gpu1", "login"]),
        ("rack[1-2]-node[3,5]-ib", ["rack1-node3-ib", "rack1-node5-ib", "rack2-node3-ib", "rack2-node5-ib"]),
    ],
)
def test_slurms_node_lists_are_expanded(nodelist, names):
    assert list(node_names(nodelist)) == names
