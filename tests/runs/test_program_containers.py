"""Programs in containers: what they find, what they cannot reach, their limits, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from small_root import PYTHON, make_small_root
from waiting import until

from megatron_rl.agent.environments.program import runner
from megatron_rl.agent.environments.program.nursery_wire import Program, ProgramEnd, ProgramImage, ProgramJob
from megatron_rl.agent.environments.program.runner import ProgramRunner
from megatron_rl.agent.sandbox.container import ContainerLimits
from megatron_rl.agent.sandbox.image_root import MAGIC
from megatron_rl.recipe.errors import ConfigurationError

LIMITS = ContainerLimits(memory_bytes=2**28, disk_bytes=2**24, processes=32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_root(tmp_path_factory.mktemp("image") / "root")


def program(tmp_path: Path, root: Path, source: str, *, network: bool = False) -> Program:
    (file := tmp_path / "agent.py").write_text(textwrap.dedent(source))
    return Program(
        [PYTHON, "agent.py"], None, [str(file)], ProgramImage(str(root), LIMITS, network, {"COLOUR": "blue"})
    )


def run(its: Program, limit_s: float = 60.0, reaches: tuple[str, int] | None = None) -> ProgramEnd:
    async def whole() -> ProgramEnd:
        runner = ProgramRunner(its, dict(os.environ))
        try:
            job = ProgramJob(json.dumps({"question": 7}), {"OPENAI_MODEL": "policy"}, limit_s, 0.3, reaches)
            return await runner.run(job)
        finally:
            await runner.close()

    return asyncio.run(whole())


def seen(its: Program, **given: object) -> dict[str, object]:
    ended = run(its, **given)  # type: ignore[arg-type]
    assert (ended.code, ended.unstarted) == (0, ""), ended
    return dict(json.loads(ended.ending))


def test_a_program_finds_its_image_its_code_and_its_problem(tmp_path: Path, root: Path) -> None:
    found = seen(
        program(
            tmp_path,
            root,
            """
            import json, os, sys, tempfile
            open("written", "w").write("here")
            with tempfile.NamedTemporaryFile() as scratch:
                os.unlink(os.__file__)  # of the image
                os.mkdir("/opt")
            print(json.dumps(dict(
                problem=json.load(sys.stdin), where=os.getcwd(), files=sorted(os.listdir()),
                variables={name: os.environ.get(name) for name in ("COLOUR", "OF_IMAGE", "OPENAI_MODEL", "USER")},
                shell=os.system("exit 3") >> 8, user=os.getuid(), pty=os.ttyname(os.openpty()[1]) != "",
            )))
            """,
        )
    )
    assert found == {
        "problem": {"question": 7},
        "where": "/work",
        "files": ["agent.py", "written"],
        "variables": {"COLOUR": "blue", "OF_IMAGE": "two words", "OPENAI_MODEL": "policy", "USER": None},
        "shell": 3,
        "user": 0,
        "pty": True,
    }
    assert (root / os.__file__.lstrip("/")).exists()
    assert not (root / "opt").exists()


def test_links_of_an_image_do_not_lead_to_files_of_the_machine(tmp_path: Path, root: Path) -> None:
    hostile = tmp_path / "hostile"
    shutil.copytree(root, hostile, symlinks=True, copy_function=os.link)
    (victim := tmp_path / "victim").mkdir()
    (victim / "resolv.conf").write_text("mine")
    for name in ("work", "tmp", "dev"):
        (hostile / name).symlink_to(victim)
    for name in ("hosts", "resolv.conf"):
        (hostile / "etc" / name).symlink_to(victim / "resolv.conf")
    source = "import json, os; open('/etc/hosts', 'a').write('x'); print(json.dumps({'files': os.listdir()}))"
    assert seen(program(tmp_path, hostile, source, network=True)) == {"files": ["agent.py"]}
    assert [*victim.iterdir()] == [victim / "resolv.conf"]
    assert (victim / "resolv.conf").read_text() == "mine"


def test_a_program_sees_neither_files_nor_processes_of_the_machine_and_cannot_gain_rights(
    tmp_path: Path, root: Path
) -> None:
    found = seen(
        program(
            tmp_path,
            root,
            f"""
            import ctypes, json, os, socket
            libc = ctypes.CDLL(None, use_errno=True)
            def refused(action):
                try:
                    action()
                except OSError as error:
                    return True
                return False
            print(json.dumps(dict(
                pids=sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
                files=os.path.exists({str(tmp_path)!r}),
                mounts=libc.mount(b"none", b"/tmp", b"tmpfs", 0, b""),
                namespaces=libc.unshare(0x10000000),
                kernel=refused(lambda: open("/proc/sys/kernel/core_pattern", "w")),
                init=refused(lambda: open("/proc/1/mem", "rb").read(1)),
                network=refused(lambda: socket.create_connection(("192.0.2.1", 80), 1)),
                devices=sorted(os.listdir("/dev")),
            )))
            """,
        )
    )
    devices = [
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    ]
    assert found == {
        "pids": [1, 2],
        "files": False,
        "mounts": -1,
        "namespaces": -1,
        "kernel": True,
        "init": True,
        "network": True,
        "devices": devices,
    }


@pytest.fixture
def server() -> Iterator[int]:
    """Port on which something answers with the length of what it is sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = str(len(self.rfile.read(int(self.headers["Content-Length"])))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening.server_port
        listening.shutdown()
        thread.join()


CALLS = """
    import json, urllib.request
    def call(port):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", b"x" * 3_000_000, timeout=20) as answer:
                return answer.read().decode()
        except OSError as error:
            return type(error).__name__
    print(json.dumps([call(PORT), call(PORT)]))
"""


def test_the_endpoint_alone_can_be_reached(tmp_path: Path, root: Path, server: int) -> None:
    its = program(tmp_path, root, CALLS.replace("PORT", str(server)))
    assert json.loads(run(its, reaches=("127.0.0.1", server)).ending) == ["3000000", "3000000"]
    assert json.loads(run(its).ending) == ["URLError", "URLError"]
    with_network = program(tmp_path, root, CALLS.replace("PORT", str(server)), network=True)
    assert json.loads(run(with_network).ending) == ["3000000", "3000000"]


@pytest.mark.parametrize(
    ("children", "each_holds", "exceeded"),
    [(6, "bytearray(2**26)", "more than 0.25 GiB of memory"), (60, "None", "more than 32 processes")],
)
def test_limits_of_a_container_end_its_program(
    tmp_path: Path, root: Path, children: int, each_holds: str, exceeded: str
) -> None:
    source = f"""
        import os, time
        for _ in range({children}):
            if os.fork() == 0:
                held = {each_holds}
                time.sleep(60)
        time.sleep(60)
    """
    ended = run(program(tmp_path, root, source))
    assert (ended.exceeded or ended.output[-40:], ended.over_limit) == (exceeded, False)


def test_threads_count_as_processes(tmp_path: Path, root: Path) -> None:
    source = """
        import threading, time
        threading.stack_size(2**16)
        for _ in range(40):
            threading.Thread(target=time.sleep, args=(60,)).start()
    """
    assert run(program(tmp_path, root, source)).exceeded == "more than 32 processes"


def test_memory_that_processes_share_counts_once(tmp_path: Path, root: Path) -> None:
    source = """
        import os, time
        held = bytearray(b"x" * 100 * 2**20)
        for _ in range(4):
            if os.fork() == 0:
                time.sleep(0.5)
                os._exit(0)
        time.sleep(0.5)
        print(1)
    """
    assert run(program(tmp_path, root, source)).ending == "1\n"


def test_a_program_that_fills_its_disk_or_its_memory_sees_the_error(tmp_path: Path, root: Path) -> None:
    source = """
        import json
        found = []
        try:
            open("full", "wb").write(b"x" * 2**25)
        except OSError as error:
            found.append(error.errno)
        try:
            held = bytearray(2**29)
        except MemoryError:
            found.append("memory")
        print(json.dumps({"found": found}))
    """
    assert seen(program(tmp_path, root, source)) == {"found": [28, "memory"]}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGSEGV])
def test_the_end_of_a_program_is_that_of_its_container(tmp_path: Path, root: Path, signum: int) -> None:
    assert run(program(tmp_path, root, "raise SystemExit(3)")).code == 3
    assert run(program(tmp_path, root, f"import os; os.kill(os.getpid(), {int(signum)})")).code == -signum
    assert "No such file" in run(program(tmp_path, root, "")._replace(command=["absent"])).unstarted


STAYS = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
    time.sleep(1000)
"""


def contained(name: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if name in " ".join(_words(each))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_nothing_is_left_after_the_limit(tmp_path: Path, root: Path) -> None:
    ended = run(program(tmp_path, root, STAYS), limit_s=1.0)
    assert ended.over_limit
    assert ended.code in (-signal.SIGKILL, -signal.SIGTERM), "SIGTERM on a busy machine, before it ignores that"
    assert not contained(str(tmp_path))


@pytest.mark.parametrize("whose", ["rank", "supervisor"])
def test_nothing_is_left_when_a_process_outside_is_killed(tmp_path: Path, root: Path, whose: str) -> None:
    mark = f"{tmp_path.name}-{whose}"
    its = program(tmp_path, root, STAYS)
    its = its._replace(command=[PYTHON, "agent.py", mark])
    script = tmp_path / "rank.py"
    script.write_text(
        "import asyncio, json, os, sys\n"
        "from megatron_rl.agent.environments.program.nursery_wire import *\n"
        "from megatron_rl.agent.environments.program.runner import ProgramRunner\n"
        f"its = json.loads({json.dumps(json.dumps(its))})\n"
        "runner = ProgramRunner(Program(*its), dict(os.environ))\n"
        "asyncio.run(runner.run(ProgramJob('1', {}, 1000.0, 0.3)))\n"
    )
    rank = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(contained(mark)) >= 4, lambda: str(contained(mark)))
        killed = psutil.Process(rank.pid)
        if whose == "supervisor":
            killed = killed.children()[0].children()[0]
        killed.kill()
        until(lambda: not contained(mark), lambda: str(contained(mark)))
    finally:
        rank.kill()
        rank.wait()


def test_an_image_that_cannot_be_used_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    (image := tmp_path / "image.sqsh").write_bytes(b"hsqs, and then nothing")
    with pytest.raises(ConfigurationError, match=r"environment\.args\.container: .*image\.sqsh"):
        run(program(tmp_path, image, "print(1)"))
    with pytest.raises(ConfigurationError, match="not a squashfs file"):
        run(program(tmp_path, Path(__file__), "print(1)"))


def test_a_program_cannot_fill_the_node_by_way_of_its_standard_input(tmp_path: Path, root: Path) -> None:
    source = """
        import json, os
        def refused(action):
            try:
                action()
            except OSError:
                return True
            return False
        def again():
            with open("/proc/self/fd/0", "r+b", buffering=0) as file:
                file.truncate(2**30)
        print(json.dumps(dict(
            problem=json.load(open(0)), written=refused(lambda: os.write(0, b"x")), again=refused(again)
        )))
    """
    found = seen(program(tmp_path, root, source.replace("open(0)", "open(0, closefd=False)")))
    assert found == {"problem": {"question": 7}, "written": True, "again": True}


def test_empty_files_are_limited_as_well(tmp_path: Path, root: Path) -> None:
    source = """
        import json, os
        def most(folder):
            for number in range(20_000):
                try:
                    os.mknod(f"{folder}/{number}")
                except OSError as error:
                    return error.errno
        print(json.dumps({folder: most(folder) for folder in (".", "/dev/shm", "/dev")}))
    """
    assert seen(program(tmp_path, root, source)) == {".": 28, "/dev/shm": 28, "/dev": 28}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_a_program_does_not_inherit_the_keys_of_the_session(tmp_path: Path, root: Path) -> None:
    source = """
        import ctypes
        libc = ctypes.CDLL(None)
        print(libc.syscall(250, 11, -3, ctypes.create_string_buffer(4096), 4096))  # bytes of the session's list of keys
        print(libc.syscall(248, b"user", b"note", b"for another rollout", 6, -3))
    """
    its = program(tmp_path, root, source)
    script = tmp_path / "rank.py"
    script.write_text(
        "import asyncio, ctypes, json, os\n"
        "from megatron_rl.agent.environments.program.nursery_wire import *\n"
        "from megatron_rl.agent.environments.program.runner import ProgramRunner\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.syscall(250, 1, None)  # a session of its own\n"
        "libc.syscall(248, b'user', b'ticket', b'secret', 6, -3)\n"
        f"its = json.loads({json.dumps(json.dumps(its))})\n"
        "async def main():\n"
        "    runner = ProgramRunner(Program(*its), dict(os.environ))\n"
        "    print((await runner.run(ProgramJob('1', {}, 60.0, 0.3))).ending)\n"
        "    await runner.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "-1"]


def test_an_image_may_take_longer_to_unpack_than_a_module_to_import(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (programs := tmp_path / "programs").mkdir()
    (unsquashfs := programs / "unsquashfs").write_text(f'#!/bin/sh\ncp -a "{root}" "$5"\n')
    unsquashfs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(runner, "START_S", 0.01)
    (image := tmp_path / "image.sqsh").write_bytes(MAGIC)
    assert run(program(tmp_path, image, "print(1)")).ending == "1\n"


def test_a_program_cannot_use_up_the_open_files_of_the_rank(tmp_path: Path, root: Path) -> None:
    source = """
        import socket, time
        held = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(700)]
        time.sleep(1)
        for each in held[:-1]:
            each.close()
        held[-1].sendall(b"x")
        print(held[-1].recv(1))
    """
    most = open_now = 0
    count = threading.Lock()

    def serve(connection: socket.socket) -> None:
        nonlocal most, open_now
        with count:
            open_now += 1
            most = max(most, open_now)
        with connection:
            connection.sendall(connection.recv(1))
        with count:
            open_now -= 1

    def accept(listening: socket.socket) -> None:
        for _ in range(700):
            threading.Thread(target=serve, args=(listening.accept()[0],)).start()

    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        ended = run(program(tmp_path, root, source.replace("PORT", str(port))), reaches=("127.0.0.1", port))
        thread.join()
    assert (ended.ending, most) == ("b'x'\n", 512), ended


@pytest.mark.skipif(os.getuid() != 0, reason="of the machine's root alone")
def test_a_program_of_root_cannot_change_the_machine(tmp_path: Path, root: Path) -> None:
    source = """
        import json, os
        found = []
        for name in ("/dev/zero", "/proc/irq/default_smp_affinity"):
            try:
                os.chmod(name, os.stat(name).st_mode & 0o777)
                found.append(name)
            except OSError:
                pass
        open("/dev/zero", "wb").write(b"x")
        print(json.dumps({"changed": found, "zero": len(open("/dev/zero", "rb").read(3))}))
    """
    assert seen(program(tmp_path, root, source)) == {"changed": [], "zero": 3}
