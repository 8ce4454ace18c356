"""A real Slurm cluster on this machine: Debian's packages, ten nodes of eight fake GPUs, up in a second or two.

Each node has its own network address, host name, processes, /dev and GPUs (namespaces, so it takes root); where the
kernel denies networks, the nodes share the machine's. The shared file system is the machine's own.

    python tests/slurm/lab.py shell        a shell in which squeue, sbatch and mrl-submit use the lab; its end ends it
    python tests/slurm/lab.py up DIR       a lab that stays until `down DIR`; `kill DIR NODE`, `start DIR NODE`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from namespaces import SYSTEM_PATH, best_isolation, plug_into_this_machine, unshare
from slurm_conf import Host, Layout, clusters_yaml, gres_conf, hosts, slurm_conf, slurmdbd_conf
from stand_in import compile_stand_in

HERE = Path(__file__).parent
PACKAGES = "slurm-wlm munge libslurm-dev gcc libc6-dev iproute2"
ACCOUNTING_PACKAGES = "slurmdbd slurm-wlm-mysql-plugin mariadb-server"
SECONDS_UP = 60.0


class LabError(Exception):
    """The lab cannot do that; says why."""


class NoLab(LabError):
    """There is none in that directory, or it has ended."""


def missing(accounting: bool = False) -> str | None:
    """Packages to install before a lab can start, or None."""
    programs = ["slurmctld", "slurmd", "munged", "srun", "gcc", "unshare"]
    packages = PACKAGES
    if accounting:
        programs += ["slurmdbd", "mariadbd"]
        packages += " " + ACCOUNTING_PACKAGES
    lacking = [program for program in programs if shutil.which(program, path=SYSTEM_PATH) is None]
    if not Path("/usr/include/slurm/spank.h").exists():
        lacking.append("slurm/spank.h")
    if lacking:
        return f"no {', '.join(lacking)} here: apt-get install {packages}"
    return None if best_isolation() else "a lab needs namespaces for its nodes: run as root"


class Cluster:
    """One lab. Ends with this object's process unless `owned` is false; then `down` ends it.

    isolation: net (a network namespace a node) or uts (host names and processes only); by default what is permitted.
    pyxis: its plugin, spank_pyxis.so, beside an installed enroot; a stand-in by default.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        nodes: int = 10,
        accounting: bool = False,
        isolation: str | None = None,
        pyxis: Path | None = None,
    ) -> None:
        self.owned = directory is None
        # Short, because Unix sockets live in it.
        self.directory = Path(tempfile.mkdtemp(prefix="mrl-lab-", dir="/tmp")) if directory is None else directory
        self.isolation = isolation or best_isolation() or "uts"
        self.names = [f"node{number:02d}" for number in range(1, nodes + 1)]
        self.accounting = accounting
        self.pyxis = pyxis
        self._keeper: subprocess.Popen | None = None

    @property
    def keeper(self) -> int | None:
        """Process whose descendants are all processes of the lab; None before it is up."""
        return self._keeper.pid if self._keeper is not None else None

    @property
    def conf(self) -> Path:
        return self.directory / "etc/slurm.conf"

    @property
    def cache(self) -> Path:
        """Directory of the base models for runs that train."""
        return self.directory / "cache"

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands, and ours, use this lab."""
        return {**os.environ, "PATH": f"{SYSTEM_PATH}:{Path(sys.executable).parent}", **self.exports}

    @property
    def exports(self) -> dict[str, str]:
        return {
            "SLURM_CONF": str(self.conf),
            "MRL_CLUSTERS": str(self.directory / "etc/clusters.yaml"),
            "XDG_STATE_HOME": str(self.directory / "home"),  # no traces in the index of the user's own runs
        }

    def up(self) -> Cluster:
        if (self.directory / "run/keeper.sock").exists():
            raise LabError(f"{self.directory} holds a lab already; end it with: lab.py down {self.directory}")
        try:
            self._come_up()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        with contextlib.suppress(NoLab):
            self._order(do="down")
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait(timeout=20)
        (self.directory / "run/keeper.sock").unlink(missing_ok=True)
        if self.owned:
            shutil.rmtree(self.directory, ignore_errors=True)  # the keeper's work, unless it did not come so far

    def _come_up(self) -> None:
        for name in ("etc", "run", "logs", "state", "spool", "dev", "lib", "share"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        key = self.directory / "run/munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        if self.pyxis is None:
            compile_stand_in(self.directory / "lib/pyxis_stand_in.so")
        else:
            (self.directory / "run/pyxis").mkdir()

        with (self.directory / "logs/keeper.log").open("wb") as log:
            self._keeper = subprocess.Popen(
                [*unshare(self.isolation), sys.executable, HERE / "keeper.py", self.directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PATH": SYSTEM_PATH},
                start_new_session=True,  # Ctrl-C in the terminal is not for the daemons
            )
        self._expect("there")
        subnet = plug_into_this_machine(self._keeper.pid) if self.isolation == "net" else None
        layout = self._layout(subnet)
        self._write_configuration(layout)
        self._tell(
            subnet=subnet,
            nodes=self.names,
            accounting=self.accounting,
            database_port=layout.database_port,
            owned=self.owned,
        )
        self._expect("up")
        self.wait_until_up(*self.names)

    def run(self, *command: str | Path, timeout: float = 60, check: bool = True, **changes: str) -> str:
        """Standard output of a command on the login node. `changes` are environment variables."""
        for _ in range(3):
            done = subprocess.run(
                [str(word) for word in command],
                env={**self.env, **changes},
                timeout=timeout,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode != -signal.SIGPIPE:  # so a command ends on which a busy controller hangs up
                break
        if check and done.returncode != 0:
            raise LabError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def kill_node(self, name: str) -> None:
        """Simulate a power failure. Slurm finds out after SlurmdTimeout."""
        self._order(do="kill", node=name)

    def restart_node(self, name: str) -> None:
        """Switches a killed node on again."""
        self._order(do="start", node=name)
        # Slurm may not have noticed yet that the node was off, and calls it idle all the time.
        where = re.search(rf"^NodeName={name} .*NodeAddr=(\S+) Port=(\d+)", self.conf.read_text(), re.MULTILINE)
        assert where is not None
        wait_until(f"the slurmd of {name} listens", lambda: listens(where[1], int(where[2])), SECONDS_UP)
        self.wait_until_up(name)

    def stop_daemon(self, name: str, signum: int = signal.SIGTERM) -> None:
        """End slurmctld, or slurmdbd of a lab with accounting, by a signal. Its state on the disk stays."""
        self._order(do="stop", daemon=name, signal=int(signum))

    def continue_daemon(self, name: str) -> None:
        """Start a stopped daemon again."""
        self._order(do="continue", daemon=name)

    def address(self, machine: str) -> str:
        """Return the network address of a node, or of `control`."""
        found = re.search(rf"^(\S+) {machine}$", (self.directory / "etc/hosts").read_text(), re.MULTILINE)
        assert found is not None, machine
        return found[1]

    def at_the_switch(self, *command: str) -> None:
        """Run a command in the network that the nodes' cables lead to; the end of a cable there is called like its
        node. Raises LabError."""
        assert self._keeper is not None and self.isolation == "net"
        inside = ["nsenter", "--net", f"--target={self._keeper.pid}", *command]
        done = subprocess.run(inside, env={"PATH": SYSTEM_PATH}, capture_output=True, text=True)
        if done.returncode != 0:
            raise LabError(f"{' '.join(command)}: {done.stderr}")

    @contextlib.contextmanager
    def configured(self, changes: Mapping[str, str]) -> Iterator[None]:
        """Replace these lines of slurm.conf."""
        text = changed = self.conf.read_text()
        for old, new in changes.items():
            assert old in text, old
            changed = changed.replace(old, new)
        try:
            self.conf.write_text(changed)
            self.run("scontrol", "reconfigure")
            yield
        finally:
            self.conf.write_text(text)
            self.run("scontrol", "reconfigure")

    def forget_jobs(self) -> None:
        """Simulate the time after MinJobAge: the controller forgets all jobs, running ones end, and ids continue."""
        following = max(map(int, self.jobs()), default=0) + 1
        self.conf.write_text(re.sub(r"(?m)^FirstJobId=.*", f"FirstJobId={following}", self.conf.read_text()))
        self._order(do="forget")
        self.wait_until_up(*self.names)

    def containers(self) -> list[dict]:
        """Requests of each step to pyxis: one record a step and node, in order."""
        records = self.directory / "containers.jsonl"
        return [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []

    def jobs(self) -> set[str]:
        return set(self.run("squeue", "--noheader", "--states=all", "--format=%A").split())

    def wait_until_up(self, *names: str, limit: float = SECONDS_UP) -> None:
        """Wait until jobs can start there, or do."""

        def up() -> bool:
            answer = self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %t", check=False)
            states = dict(line.split() for line in answer.splitlines())
            return all(states.get(name) in {"idle", "mix", "alloc", "comp"} for name in names)

        wait_until(f"nodes {', '.join(names)} are up", up, limit)

    def wait_until_idle(self, first: int, last: int, limit: float = SECONDS_UP) -> None:
        """Wait until no job is on these nodes: those of other tests may be on their way out."""
        nodes = f"node[{first:02d}-{last:02d}]"
        asked = ("sinfo", "--noheader", "--Node", "--partition=low", f"--nodes={nodes}", "--format=%T")
        wait_until(f"{nodes} are idle", lambda: set(self.run(*asked).split()) == {"idle"}, limit)

    def _layout(self, subnet: str | None) -> Layout:
        names = self.names
        ports = [6817, *[6818] * len(names), 6819, 3306] if subnet else _free_ports(len(names) + 3)
        addresses = [f"{subnet}.{number}" if subnet else "127.0.0.1" for number in (253, *range(1, len(names) + 1))]
        return Layout(
            directory=self.directory,
            control=Host("control", addresses[0], ports[0]),
            nodes=tuple(map(Host, names, addresses[1:], ports[1:])),
            accounting=Host("control", addresses[0], ports[-2]) if self.accounting else None,
            database_port=ports[-1] if self.accounting else None,
        )

    def _write_configuration(self, layout: Layout) -> None:
        etc = self.directory / "etc"
        (etc / "slurm.conf").write_text(slurm_conf(layout))
        (etc / "gres.conf").write_text(gres_conf())
        (etc / "hosts").write_text(hosts(layout))
        plugin = f"{self.directory}/lib/pyxis_stand_in.so {self.directory}"
        if self.pyxis is not None:
            plugin = f"{self.pyxis} runtime_path={self.directory}/run/pyxis"
        (etc / "plugstack.conf").write_text(f"required {plugin}\n")
        (etc / "clusters.yaml").write_text(clusters_yaml(layout, sys.executable))
        # To our own check an empty squashfs file, to the stand-in for pyxis an image that sets one variable.
        (etc / "image.sqsh").write_bytes(b"hsqs".ljust(96, b"\0") + b"\nMRL_IMAGE=lab\n")
        if self.accounting:
            (etc / "slurmdbd.conf").touch(0o600)
            (etc / "slurmdbd.conf").write_text(slurmdbd_conf(layout))

    def _tell(self, **settings: object) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        print(json.dumps(settings), file=self._keeper.stdin, flush=True)

    def _expect(self, word: str) -> None:
        assert self._keeper is not None and self._keeper.stdout is not None
        if self._keeper.stdout.readline() != f"{word}\n":
            raise LabError(f"the lab did not come up:\n{(self.directory / 'logs/keeper.log').read_text()}")

    def _order(self, **order: str | int) -> None:
        with socket.socket(socket.AF_UNIX) as call:
            call.settimeout(SECONDS_UP)
            try:
                call.connect(str(self.directory / "run/keeper.sock"))
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise NoLab(f"{self.directory}: no lab is up there") from error
            with call.makefile("rw") as line:
                print(json.dumps(order), file=line, flush=True)
                answer = json.loads(line.readline() or "{}")
        if "error" in answer:
            raise LabError(answer["error"])


def wait_until(what: str, condition: Callable[[], object], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"waited {limit:.0f} s in vain until {what}")
        time.sleep(0.1)


def listens(address: str, port: int) -> bool:
    """Whether a machine answers a connection within a second."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def export(cluster: Cluster) -> str:
    return "export " + " ".join(f"{name}={value}" for name, value in cluster.exports.items())


def shell(cluster: Cluster) -> int:
    print(
        f"A Slurm of {len(cluster.names)} nodes with 8 fake GPUs each; partitions low (preemptible) and high.\n"
        "Try:  mrl-submit demo --cluster lab job.nodes=2 training.steps=6    (lab-pyxis: in a container)\n"
        "      mrl status; mrl logs -f; mrl cancel --drain; mrl doctor demo --cluster lab\n"
        "      sinfo; squeue; srun --partition=high --nodes=10 --exclusive sleep 60    (preempts)\n"
        f"      {sys.executable} {HERE}/lab.py kill {cluster.directory} node01\n"
        f"In another terminal first: {export(cluster)}\n"
        "Ctrl-D ends the lab and all its jobs."
    )
    return subprocess.run([os.environ.get("SHELL", "/bin/bash")], env=cluster.env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["shell", "up", "down", "kill", "start"])
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("node", nargs="?")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd, so that sacct works")
    parser.add_argument("--pyxis", type=Path, help="spank_pyxis.so, instead of a stand-in; needs enroot")
    given = parser.parse_args()
    if given.what != "shell" and given.directory is None:
        parser.error(f"{given.what} needs the lab's directory")

    if (reason := missing(given.accounting)) is not None:
        raise LabError(reason)
    directory = given.directory and given.directory.resolve()
    cluster = Cluster(directory, nodes=given.nodes, accounting=given.accounting, pyxis=given.pyxis)
    match given.what:
        case "shell":
            cluster.up()
            try:
                return shell(cluster)
            finally:
                cluster.down()
        case "up":
            cluster.up()
            print(export(cluster))
        case "down":
            if not cluster.directory.is_dir():
                raise NoLab(f"{cluster.directory}: no such directory")
            cluster.down()
        case "kill" | "start" if given.node is None:
            parser.error(f"{given.what} needs the name of a node")
        case "kill":
            cluster.kill_node(given.node)
        case "start":
            cluster.restart_node(given.node)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
