"""Namespaces that this machine permits a lab, and a network cable into them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

PYTHON = str(Path(sys.executable).resolve().parent)  # a shim such as pyenv's takes longer to start than Python
SYSTEM_PATH = f"{PYTHON}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # Debian keeps the daemons off a user's PATH


@cache
def best_isolation() -> str | None:
    """Isolation that this user may have, found out by trying, since it differs between containers. None: no
    namespaces."""
    for isolation, probe in {"net": "ip link add type veth && ip link add type bridge", "uts": "true"}.items():
        command = [*unshare(isolation), "sh", "-c", f"mount -t tmpfs none /mnt && {probe}"]
        if subprocess.run(command, env={"PATH": SYSTEM_PATH}, capture_output=True).returncode == 0:
            return isolation
    return None


def unshare(isolation: str) -> list[str]:
    """The command before a command that gives it namespaces, and ends with it all that it started."""
    network = ["--net"] if isolation == "net" else []
    return ["unshare", *network, "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def plug_into_this_machine(pid: int) -> str:
    """Connects this machine (the login node) to the lab of process `pid` and returns the first three of four numbers
    of the lab's addresses. The name of the device reserves them; it goes with the lab's namespace."""
    for number in range(256):
        name, subnet = f"mrl-lab{number}", f"10.77.{number}"
        cable = f"link add {name} type veth peer name uplink netns {pid}\n"
        plug = f"{cable}addr add {subnet}.254/24 dev {name}\nlink set {name} up\n"
        done = subprocess.run(
            ["ip", "-batch", "-"], input=plug, env={"PATH": SYSTEM_PATH}, capture_output=True, text=True
        )
        if done.returncode == 0:
            return subnet
        if "File exists" not in done.stderr:
            raise OSError(f"could not connect the lab: {done.stderr}")
    raise OSError("256 labs are up already")
