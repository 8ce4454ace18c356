"""Another user of a run's nodes, who connects to all its listeners, and tries to read and change all it has.

`attack` finds what the processes of a run listen on and own, and lets stranger.py try itself on that, as user and group
65534, in the network and mounts of each node. It returns what the stranger achieved: nothing, or the run has a gap.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fault import Fault, Target, Undo

from megatron_rl.contract.paths import RunDir

STRANGER = 65534
LIMIT_S = 600.0
OF_THE_LIBRARY = "torch's store answers"
"""Known gap: torch.distributed's store, by which ranks meet, has no way to ask a client who it is."""
SHARED = ("/dev/shm", "/tmp", "/var/tmp")
OF_THE_TESTS = "/file-faults/control"
"""File by which the faults of file_faults.py reach the processes of a run, of any user."""
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


@dataclass
class Node:
    """Processes of a run that share a network."""

    processes: list[int] = field(default_factory=list)
    ports: set[tuple[str, int]] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)


def processes_with(run_dir: Path) -> list[int]:
    """All processes of a run: those that have its directory in their environment or among their arguments."""
    found = []
    named = str(run_dir).encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if named in words or b"MRL_RUN_DIR=" + named in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return sorted(found)


def nodes_of(processes: list[int]) -> dict[str, Node]:
    """Processes and what they listen on, by network namespace."""
    nodes: dict[str, Node] = {}
    for number in processes:
        with contextlib.suppress(OSError):
            process = Path(f"/proc/{number}")
            node = nodes.setdefault(str((process / "ns/net").readlink()), Node())
            node.processes.append(number)
            inodes = {str(file.readlink()) for file in (process / "fd").iterdir()}
            for line in (process / "net/tcp").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and f"socket:[{words[9]}]" in inodes:
                    node.ports.add(_address(words[1]))
            for line in (process / "net/unix").read_text().splitlines()[1:]:
                words = line.split()
                if len(words) == 8 and f"socket:[{words[6]}]" in inodes:
                    node.sockets.add(words[7])
    return nodes


def _address(text: str) -> tuple[str, int]:
    """Address as /proc/net/tcp writes it: 0100007F:1F90 is port 8080 of loopback."""
    host, port = text.split(":")
    octets = reversed(bytes.fromhex(host))
    shown = ".".join(map(str, octets))
    return ("127.0.0.1" if shown == "0.0.0.0" else shown), int(port, 16)


def attack(run_dir: Path, seed: int = 0, python: str = sys.executable) -> list[str]:
    """Let a stranger try everything on a run's processes and files, on each of its nodes. Returns what succeeded."""
    achieved = []
    run = RunDir(run_dir)
    token = run.token.read_text().strip() if run.token.exists() else None
    for node in nodes_of(processes_with(run_dir)).values():
        with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
            Path(folder).chmod(0o777)
            marker = Path(folder, "marker")
            answer = _on(node, run, marker, seed, python)
            achieved += answer["achieved"]
            if marker.exists():
                achieved.append("a pickle was loaded")
        achieved += [f"{name} shows the token" for name, text in answer["texts"].items() if token and token in text]
    return sorted(set(achieved))


def _on(node: Node, run: RunDir, marker: Path, seed: int, python: str) -> dict:
    given = {
        "seed": seed,
        "marker": str(marker),
        "ports": sorted(node.ports),
        "sockets": sorted(node.sockets),
        "folders": [str(run.root), str(run.checkpoints), str(run.bank)],
        "files": _files_of(node),
        "processes": [_as_seen_there(number) for number in node.processes],
    }
    as_stranger = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    program = (Path(__file__).with_name("stranger.py")).read_text()
    for number in node.processes:
        inside = ["nsenter", "--net", "--mount", "--pid", f"--target={number}"]
        command = [*inside, *as_stranger, os.path.realpath(python), "-I", "-S", "-c", program]
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, timeout=LIMIT_S, cwd="/"
        )
        if done.returncode == 0:
            return dict(json.loads(done.stdout))
        gone = f"cannot open /proc/{number}/" in done.stderr or "No such process" in done.stderr
        assert gone, done.stderr
    return {"achieved": [], "texts": {}}


def _as_seen_there(number: int) -> int:
    """Id of a process in its own namespace."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{number}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return number


def _files_of(node: Node) -> list[str]:
    """Files in folders that all users share, which the processes of a run have open or mapped."""
    found = set()
    for number in node.processes:
        with contextlib.suppress(OSError):
            names = [str(file.readlink()) for file in Path(f"/proc/{number}/fd").iterdir()]
            names += [
                line.split(maxsplit=5)[5]
                for line in Path(f"/proc/{number}/maps").read_text().splitlines()
                if "/" in line
            ]
            found |= {name.removesuffix(" (deleted)") for name in names if name.startswith(SHARED)}
    shared = {name for name in found if Path(name).suffix != ".so"}
    return sorted(name for name in shared if not name.endswith(OF_THE_TESTS))


class Intruder(AssertionError):
    """A stranger achieved something; the message says what."""


def _apply(target: Target, chance: random.Random) -> Undo | None:
    if not nodes_of(processes_with(target.run_dir)):
        return None
    achieved = [each for each in attack(target.run_dir, chance.getrandbits(32)) if OF_THE_LIBRARY not in each]
    if achieved:
        raise Intruder(f"another user of {target.run_dir}'s nodes achieved: {'; '.join(achieved)}")
    return lambda: None


FAULTS = (Fault("a second user connects, reads and writes", _apply),)
