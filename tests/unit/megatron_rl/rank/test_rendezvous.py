"""Ranks meet at the address that rank 0 publishes, on the job's interface alone, within a time limit."""

from __future__ import annotations

import threading
from datetime import timedelta

import psutil
import pytest

from megatron_rl.contract.attempt_records import Address
from megatron_rl.contract.records import if_readable, read
from megatron_rl.rank.rendezvous import meet
from megatron_rl.rank.world import World

SHORT = timedelta(seconds=10)


def test_an_early_rank_waits_for_the_address(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    address = tmp_path / "addresses" / "train.json"
    stores = {}
    early = threading.Thread(target=lambda: stores.update(one=meet(address, 1, 2, SHORT)))
    early.start()
    early.join(0.3)
    assert early.is_alive()
    stores["zero"] = meet(address, 0, 2, SHORT)
    early.join(10)
    stores["one"].set("key", "value")
    assert stores["zero"].get("key") == b"value"


def test_the_listener_is_bound_to_the_interface_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = meet(tmp_path / "train.json", 0, 1, SHORT)
    address = if_readable(read(Address, tmp_path / "train.json"))
    assert address is not None
    port = address.port
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == port and not c.raddr]
    assert listening == ["127.0.0.1"], store


def test_an_address_that_never_appears_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(TimeoutError, match=r"did not publish its address in .*train\.json"):
        meet(tmp_path / "train.json", 1, 2, timedelta(seconds=0.3))


def test_an_unreadable_address_is_read_again(tmp_path, monkeypatch):
    """Another node may see the file's name before its content."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    address = tmp_path / "train.json"
    address.write_text("")
    threading.Timer(0.3, lambda: stores.append(meet(address, 0, 2, SHORT))).start()
    stores = []
    stores.append(meet(address, 1, 2, SHORT))


def test_slurm_overrides_the_images_rank_in_a_step_of_mrl(monkeypatch):
    for name, value in {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "3")
    assert World.from_environment().rank == 3, "not a step of mrl"
    monkeypatch.setenv("MRL_STEP", "train")
    assert World.from_environment() == World(rank=9, size=16, local_rank=1)
