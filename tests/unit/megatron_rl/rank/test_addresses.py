"""A listener is published under an address that the job's other nodes reach, on the interface the user named."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.errors import ConfigurationError
from megatron_rl.rank import addresses as addresses_module
from megatron_rl.rank.addresses import address_towards, is_named, lead_gloo, node_names, own_address

INTERFACES = {"lo": "127.0.0.1", "eno1": "10.0.0.5", "eth0": "10.1.0.5", "eth1": "10.2.0.5", "docker0": "172.17.0.1"}
DOWN = "eth1"


@pytest.fixture
def node(monkeypatch):
    """A node with these interfaces; say what its name and the job's environment are."""
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


def test_the_node_is_known_by_its_name(node):
    node("10.0.0.5", **TWO)
    assert own_address() == "10.0.0.5"


def test_alone_a_node_may_keep_to_itself(node):
    node("127.0.1.1")
    assert own_address() == "127.0.1.1"
    node(None)
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize("name_means", ["127.0.1.1", None])
def test_among_several_nodes_it_is_known_by_the_way_to_another_one(node, name_means):
    node(name_means, {"10.1.0.1": "10.1.0.5"}, **TWO, SLURM_LAUNCH_NODE_IPADDR="10.1.0.1")
    assert own_address() == "10.1.0.5"


def test_where_the_step_was_launched_over_loopback_a_neighbour_shows_the_way(node):
    routes = {"127.0.0.1": "127.0.0.1", "gpu07": "127.0.1.1", "gpu08": "10.0.0.5"}
    node("127.0.1.1", routes, **TWO, SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
    assert own_address() == "10.0.0.5"


def test_nodes_that_share_a_machine_meet_on_its_loopback(node):
    node("127.0.0.1", {"127.0.0.1": "127.0.0.1", "gpu08": "127.0.0.1"}, **TWO, SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
    assert own_address() == "127.0.0.1"


def test_an_address_that_nobody_reaches_is_refused_with_the_way_out(node):
    node("127.0.1.1", **TWO)
    with pytest.raises(
        ConfigurationError, match=r"gpu07 does not know .*; set NCCL_SOCKET_IFNAME in the cluster profile"
    ):
        own_address()


@pytest.mark.parametrize(
    ("names", "address"),
    [
        ("eth0", "10.1.0.5"),
        ("eth", "10.1.0.5"),  # a prefix; eth1 is down
        ("=eth0", "10.1.0.5"),
        ("ib,eth", "10.1.0.5"),
        ("^lo,docker,eno", "10.1.0.5"),
        ("^lo,docker", "10.0.0.5"),  # of those that are left the one of the node's name
        ("^docker", "10.0.0.5"),
        ("ib", "10.0.0.5"),  # there is none: the library itself will say so
        ("=eth", "10.0.0.5"),
        ("lo", "10.0.0.5"),
    ],
)
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_the_users_interface_goes_first(node, variable, names, address):
    node("10.0.0.5", **TWO, **{variable: names})
    assert own_address() == address


def test_of_the_users_interfaces_the_one_towards_the_others_goes_first(node):
    node("127.0.1.1", {"10.1.0.1": "10.1.0.5"}, **TWO, SLURM_LAUNCH_NODE_IPADDR="10.1.0.1", NCCL_SOCKET_IFNAME="^lo")
    assert own_address() == "10.1.0.5"


def test_gloos_own_variable_goes_before_nccls(node):
    node("127.0.1.1", **TWO, GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eno1")
    assert own_address() == "10.1.0.5"


def test_names_are_matched_as_nccl_does():
    assert is_named("eth10", "eth1")
    assert not is_named("eth10", "=eth1")
    assert is_named("ib0", "=eth0,ib0")
    assert is_named("ib0", "^eth,lo")
    assert not is_named("eth0", "^eth,lo")
    assert is_named("eth01", "^=eth0")
    assert not is_named("eth0", "")


@pytest.mark.parametrize(
    ("name_means", "address", "led"),
    [
        ("127.0.1.1", "10.1.0.5", "eth0"),
        (None, "10.1.0.5", "eth0"),
        ("10.0.0.5", "10.1.0.5", None),  # gloo finds its way
        ("127.0.1.1", "127.0.0.1", None),  # the ranks are all here
        ("127.0.1.1", "10.9.9.9", None),
        ("127.0.1.1", None, None),
    ],
)
def test_gloo_is_led_where_the_nodes_name_misleads_it(node, monkeypatch, name_means, address, led):
    node(name_means, **TWO)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    lead_gloo(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == led


def test_gloo_keeps_to_what_the_user_says(node):
    node("127.0.1.1", **TWO, GLOO_SOCKET_IFNAME="eno1")
    lead_gloo("10.1.0.5")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eno1"


def test_the_way_to_this_very_node_is_known_and_to_nowhere_is_none():
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
def test_slurms_lists_of_nodes_are_read(nodelist, names):
    assert list(node_names(nodelist)) == names
