"""Process that runs the daemons of one lab. It is the first process of the lab's namespaces, so the kernel ends all
others with it.

The owner holds the keeper's standard input open. If the owner ends, even by SIGKILL, the keeper reads the end of file
and leaves. Network devices live in the namespaces and end with them.

The keeper reads its settings, one line of JSON, from standard input. Later commands come over the socket
run/keeper.sock, one line of JSON each, with one line as answer: `kill` or `start` with a node, `stop` or `continue`
with slurmctld or slurmdbd, `forget`, `down`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

GPU_DEVICE = os.makedev(1, 3)  # that of /dev/null, because nothing computes on it
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}  # major number 1

# Runs in new namespaces: prints a line, waits for its network address, then becomes a machine called $1. Process 1 is a
# shell, because slurmd would not collect the orphans it inherits. The node has its own /dev, so that a test can
# remove a GPU, and its own containers, if the lab has the real pyxis.
NODE = r"""
set -eu
name=$1 lab=$2 conf=$3
echo there
read -r address
hostname "$name"
if [ -n "$address" ]; then
    printf 'link set lo up\naddr add %s/24 dev eth0\nlink set eth0 up\n' "$address" | ip -batch -
fi
dev=$lab/spool/$name.dev
mkdir -p "$dev"
mount -t tmpfs -o mode=755,size=16g dev "$dev" # /dev/shm of a node with eight GPUs
cp -a "$lab/dev/." "$dev"
mount --rbind /dev/pts "$dev/pts"
mount --rbind "$dev" /dev
if [ -d "$lab/run/pyxis" ]; then # where enroot unpacks images by default
    mkdir -p "$lab/spool/$name.enroot" ~/.local/share/enroot
    mount --bind "$lab/spool/$name.enroot" ~/.local/share/enroot
    mount -t tmpfs -o mode=755 pyxis "$lab/run/pyxis"
fi
exec unshare --pid --fork --kill-child --mount-proc \
    sh -c 'slurmd -D -f "$1" -N "$0" & wait' "$name" "$conf" </dev/null >>"$lab/logs/$name.out" 2>&1
"""


class Keeper:
    def __init__(self, directory: Path, settings: dict) -> None:
        self.directory = directory
        self.conf = directory / "etc/slurm.conf"
        self.subnet: str | None = settings["subnet"]
        self.nodes: list[str] = settings["nodes"]
        self.accounting: bool = settings["accounting"]
        self.database_port: int | None = settings["database_port"]
        self.owned: bool = settings["owned"]
        self.slurmds: dict[str, subprocess.Popen] = {}
        self.daemons: dict[str, subprocess.Popen] = {}

    def up(self) -> None:
        socket.sethostname("control")
        subprocess.run(["mount", "--bind", self.directory / "etc/hosts", "/etc/hosts"], check=True)
        self._make_devices()
        if self.subnet is not None:
            _ip(
                "link set lo up",
                "link add switch type bridge",
                f"addr add {self.subnet}.253/24 dev switch",
                "link set switch up",
                "link set uplink master switch up",
            )
        run = self.directory / "run"
        munge = [f"--key-file={run}/munge.key", f"--socket={run}/munge.socket", f"--seed-file={run}/munge.seed"]
        munge += [f"--pid-file={run}/munged.pid", f"--log-file={self.directory}/logs/munged.log"]
        self._start("munged", "--foreground", *munge)
        _wait_for(run / "munge.socket")
        if self.accounting:
            self._start_accounting()
        self.begin("slurmctld")
        self.start(*self.nodes)

    def begin(self, daemon: str, *options: str) -> None:
        """Start slurmctld or slurmdbd."""
        where = ["-f", str(self.conf)] if daemon == "slurmctld" else []
        self.daemons[daemon] = self._start(daemon, "-D", *options, *where)

    def stop(self, daemon: str, signum: int) -> None:
        """End slurmctld or slurmdbd by a signal, at last by SIGKILL."""
        process = self.daemons.pop(daemon)
        process.send_signal(signum)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start(self, *nodes: str) -> None:
        namespaces = ["--mount", "--uts", "--propagation", "private"]
        for node in nodes:
            if self.subnet is not None:
                subprocess.run(["ip", "link", "delete", node], stderr=subprocess.DEVNULL)  # of its previous start
            command = ["unshare", *(["--net"] if self.subnet else []), *namespaces]
            self.slurmds[node] = subprocess.Popen(
                [*command, "bash", "-c", NODE, "node", node, str(self.directory), str(self.conf)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        cables = []
        for node in nodes:
            machine = self.slurmds[node]
            assert machine.stdout is not None
            if machine.stdout.readline() != "there\n":
                raise RuntimeError(f"{node} got no namespaces")
            if self.subnet is not None:
                # The hardware address stays the same at each start, because other nodes cache it for a minute.
                hardware = f"02:00:00:00:00:{self.nodes.index(node) + 1:02x}"
                cables.append(f"link add {node} type veth peer name eth0 address {hardware} netns {machine.pid}")
                cables.append(f"link set {node} master switch up")
        _ip(*cables)
        for node in nodes:
            machine = self.slurmds[node]
            assert machine.stdin is not None
            machine.stdin.write(f"{self.address(node)}\n")
            machine.stdin.close()

    def kill(self, node: str) -> None:
        """Simulate a power failure: the kernel kills all processes in the node's PID namespace with its first one."""
        machine = self.slurmds.pop(node)
        machine.kill()
        machine.wait()

    def forget(self) -> None:
        """Restart the controller without its saved state."""
        self.stop("slurmctld", signal.SIGKILL)
        self.begin("slurmctld", "-c")

    def address(self, node: str) -> str:
        return f"{self.subnet}.{self.nodes.index(node) + 1}" if self.subnet else ""

    def serve(self) -> None:
        """Answer commands until `down` arrives or the owner ends."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.directory / "run/keeper.sock"))
            listener.listen()
            while True:
                waiting_for: list = [listener, *([sys.stdin] if self.owned else [])]
                ready, _, _ = select.select(waiting_for, [], [], 0.5)
                self._reap()
                if sys.stdin in ready:
                    return
                if listener in ready:
                    caller, _ = listener.accept()
                    with caller, caller.makefile("rw") as line:
                        order = json.loads(line.readline())
                        print(json.dumps(self._obey(order)), file=line, flush=True)
                    if order["do"] == "down":
                        return

    def _obey(self, order: dict) -> dict:
        try:
            match order:
                case {"node": node} if node not in self.nodes:
                    return {"error": f"no node is called {node}; there are {self.nodes[0]} to {self.nodes[-1]}"}
                case {"do": "kill", "node": node} if node not in self.slurmds:
                    return {"error": f"{node} is off already"}
                case {"do": "start", "node": node} if node in self.slurmds:
                    return {"error": f"{node} is on already"}
                case {"do": "stop", "daemon": daemon} if daemon not in self.daemons:
                    return {"error": f"{daemon} does not run"}
                case {"do": "continue", "daemon": daemon} if daemon in self.daemons:
                    return {"error": f"{daemon} runs already"}
                case {"do": "stop", "daemon": daemon, "signal": signum}:
                    self.stop(daemon, signum)
                case {"do": "continue", "daemon": daemon}:
                    self.begin(daemon)
                case {"do": "kill", "node": node}:
                    self.kill(node)
                case {"do": "start", "node": node}:
                    self.start(node)
                case {"do": "forget"}:
                    self.forget()
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            return {"error": str(error)}
        return {}

    def _start(self, *command: str) -> subprocess.Popen:
        with (self.directory / f"logs/{command[0]}.out").open("ab") as out:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self._environment())

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def _start_accounting(self) -> None:
        data = self.directory / "database"
        data.mkdir()
        shutil.chown(data, "mysql")
        files = [f"--datadir={data}", f"--socket={data}/socket", f"--pid-file={data}/pid", "--skip-grant-tables"]
        where = ["--bind-address=127.0.0.1", f"--port={self.database_port}"]
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}", "--skip-test-db"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self._start("mariadbd", "--no-defaults", "--user=mysql", *files, *where, "--innodb-buffer-pool-size=64M")
        _wait_for(data / "socket")
        self.begin("slurmdbd")
        _wait_until_it_works("sacctmgr", "--immediate", "add", "cluster", "lab", environment=self._environment())

    def _make_devices(self) -> None:
        """Create the devices from which each node's /dev is copied."""
        dev = self.directory / "dev"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "dev", dev], check=True)
        os.umask(0)
        for name, minor in DEVICES.items():
            os.mknod(dev / name, 0o666 | 0o020000, os.makedev(1, minor))
        for gpu in range(8):
            os.mknod(dev / f"nvidia{gpu}", 0o666 | 0o020000, GPU_DEVICE)
        os.mknod(dev / "tty", 0o666 | 0o020000, os.makedev(5, 0))
        os.mknod(dev / "ptmx", 0o666 | 0o020000, os.makedev(5, 2))
        os.umask(0o022)
        (dev / "pts").mkdir()
        (dev / "shm").mkdir()
        (dev / "shm").chmod(0o1777)
        for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
            (dev / name).symlink_to(f"/proc/self/fd{target}")

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no child is left
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _wait_for(path: Path, limit: float = 20) -> None:
    _wait_until_it_works("test", "-e", str(path), limit=limit)


def _wait_until_it_works(*command: str, environment: dict[str, str] | None = None, limit: float = 20) -> None:
    script = 'until "$@"; do sleep 0.05; done'
    subprocess.run(
        ["sh", "-c", script, "sh", *command],
        timeout=limit,
        env=environment,
        check=True,
        stdout=sys.stderr,  # the owner reads stdout
    )


def main() -> None:
    directory = Path(sys.argv[1])
    print("there", flush=True)
    keeper = Keeper(directory, json.loads(sys.stdin.readline()))
    try:
        keeper.up()
        print("up", flush=True)
        keeper.serve()
    finally:
        if keeper.owned:
            subprocess.run(["umount", directory / "dev"], stderr=subprocess.DEVNULL)
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
