"""Functions of the user's in separate processes: what they may do, how they fail, and that nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.agent.own_process.function import OwnFunction
from megatron_rl.agent.scoring import Call, NotScored, Scored, UnusableFunction

SOURCE = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

print("loaded")
called = []

def reward(response, **columns):
    called.append(response)
    return globals()[response](**columns)

def alarm():
    """A grader with its own limit, as math_verify's parse and verify have."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return float(threading.current_thread() is threading.main_thread())

def threads():
    found = []
    thread = threading.Thread(target=lambda: found.append(1))
    thread.start()
    thread.join()
    return len(found)

def loops():
    return asyncio.run(asyncio.sleep(0, 1))

def program():
    """A child that obeys SIGTERM, which the process itself survives."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    child.terminate()
    return -child.wait()

def forked():
    child = os.fork()
    if not child:
        time.sleep(99)
    os.kill(child, signal.SIGTERM)
    return os.waitpid(child, 0)[1]

def state():
    return len(called)

def columns(**given):
    return float(given == {"a": "\\ud800", "b": [1.5, None], "c": b"x"})

def prints():
    print("from Python")
    os.system("echo from a child")
    sys.stderr.write("and an error")
    return {"reward": 1, "short": 0.5}

def floods():
    os.system("head -c 3000000 /dev/zero | tr '\\\\0' x; echo the end")
    return 1

def pid():
    return os.getpid()

def sleeps():
    time.sleep(99)

def leaves():
    """A child in a new session outlives its parent."""
    child = subprocess.Popen("sleep 98 & sleep 97", shell=True, start_new_session=True)
    return child.pid

def leaves_and_exits():
    print("leaving", leaves())
    os._exit(3)

def sys_exit():
    sys.exit(3)

def crash():
    ctypes.string_at(0)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def network():
    raise ConnectionResetError("gone")

def bug():
    print("about to look up")
    return {}["city"]

def mute():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("text")
    raise Mute

def flaky():
    called.append("again")
    if called.count("again") % 2:
        raise ConnectionError("try again")
    return 1
'''

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnFunction]:
    file = tmp_path_factory.mktemp("own") / "reward.py"
    file.write_text(SOURCE)
    function = OwnFunction(file, "reward", 1)
    yield function
    function.close()


def call(
    function: OwnFunction, response: str, limit_s: float = LIMIT_S, retries: int = 0, **columns: Any
) -> Scored | NotScored:
    async def asked() -> Scored | NotScored:
        try:
            return await function(Call((response,), columns, limit_s, retries))
        except NotScored as error:
            return error

    return asyncio.run(asked())


def value(found: Scored | NotScored) -> Any:
    assert isinstance(found, Scored), f"{found} {vars(found)}"
    return found.value


@pytest.mark.parametrize("what", ["alarm", "threads", "loops"])
def test_function_runs_in_a_main_thread(function: OwnFunction, what: str) -> None:
    assert value(call(function, what)) == 1.0


def test_children_of_a_function_obey_signals(function: OwnFunction) -> None:
    assert value(call(function, "program")) == signal.SIGTERM
    assert value(call(function, "forked")) == signal.SIGTERM


def test_signals_for_the_ranks_do_not_end_the_function(function: OwnFunction) -> None:
    pid = int(value(call(function, "pid")))
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(pid, each)
        os.kill(psutil.Process(pid).ppid(), each)
    assert value(call(function, "pid")) == pid


def test_state_is_kept_between_answers_and_columns_arrive_as_they_are(function: OwnFunction) -> None:
    first = value(call(function, "state"))
    assert value(call(function, "state")) == first + 1
    assert value(call(function, "columns", a="\ud800", b=[1.5, None], c=b"x")) == 1.0


def test_what_a_function_and_its_children_print_belongs_to_its_answer(function: OwnFunction) -> None:
    found = call(function, "prints")
    assert value(found) == {"reward": 1.0, "short": 0.5}
    assert {*found.printed.splitlines()} == {"from Python", "from a child", "and an error"}
    assert call(function, "state").printed == ""


def test_a_flood_of_output_is_cut(function: OwnFunction) -> None:
    found = call(function, "floods")
    assert value(found) == 1
    assert len(found.printed) == 4000 and found.printed.endswith("xxxthe end\n")


@pytest.mark.parametrize(
    ("what", "reason", "fault", "trace"),
    [
        ("bug", "reward at reward.py:{line}: KeyError: 'city'", True, 'return {}["city"]'),
        ("sys_exit", "reward at reward.py:{line}: SystemExit: 3", True, "sys.exit(3)"),
        ("mute", "reward at reward.py:{line}: Mute: its text raises KeyError", True, "raise Mute"),
        ("network", "reward at reward.py:{line}: ConnectionResetError: gone", False, "raise ConnectionResetError"),
        ("crash", "reward at reward.py:7: its process ended (SIGSEGV)", True, ""),
        ("leaves_and_exits", "reward at reward.py:7: its process ended (exit code 3)", True, ""),
        ("killed", "reward at reward.py:7: its process ended (SIGKILL)", False, ""),
    ],
)
def test_failure_names_the_line_and_says_whose_fault_it_is(
    function: OwnFunction, what: str, reason: str, fault: bool, trace: str
) -> None:
    found = call(function, what)
    line = next((number for number, text in enumerate(SOURCE.splitlines(), 1) if trace and trace in text), 0)
    assert isinstance(found, NotScored)
    assert (str(found), found.fault, found.wrong) == (reason.format(line=line), fault, False)
    assert trace in found.trace
    if what == "bug":
        assert found.printed == "about to look up\n"
    assert value(call(function, "alarm")) == 1.0, "the next answer has a process again"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "None"),
        ("'1'", "'1' (str)"),
        ("float('nan')", "nan"),
        ("[1.0]", "[1.0] (list)"),
        ("{}", "a mapping without components"),
        ("{'right': 1, 'short': None}", "a mapping whose component 'short' is None"),
        ("{'a/b': 1}", "a component named 'a/b'"),
    ],
)
def test_wrong_type_is_named(function: OwnFunction, returned: str, said: str) -> None:
    # eval of the test's own text: `reward` looks names up among its globals
    found = call(function, "eval_", text=returned)
    assert isinstance(found, NotScored) and found.wrong and found.fault
    assert str(found).startswith(f"reward.py:7: reward returned {said}")


SOURCE += "\ndef eval_(text):\n    return eval(text)\n"


def alive(pid: int) -> list[int]:
    """The process group of a child that was left behind."""
    return [one.pid for one in psutil.process_iter() if one.is_running() and _group(one.pid) == pid]


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_children_left_behind_end_with_the_process(function: OwnFunction) -> None:
    group = int(value(call(function, "leaves")))
    assert alive(group)
    call(function, "leaves_and_exits")
    assert not alive(group)


def test_answer_over_its_limit_is_killed_and_the_answers_behind_it_are_scored(function: OwnFunction) -> None:
    async def together() -> list[Any]:
        calls = [Call((name,), {}, limit, 1) for name, limit in (("sleeps", 0.3), ("alarm", 60.0), ("alarm", 60.0))]
        return await asyncio.gather(*map(function, calls), return_exceptions=True)

    late, *others = asyncio.run(together())
    assert str(late) == "reward: TimeoutError: no score within 0.3 s (environment.reward_timeout_s)"
    assert [value(each) for each in others] == [1.0, 1.0]


def test_failed_answer_is_scored_again(function: OwnFunction) -> None:
    assert isinstance(call(function, "flaky"), NotScored)
    assert value(call(function, "flaky", retries=1)) == 1.0
    assert value(call(function, "flaky", retries=1)) == 1.0


def test_coroutines_of_many_answers_wait_together_and_one_over_its_limit_is_cancelled(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import asyncio\nwaiting = set()\nfull = asyncio.Event()\n"
        "async def reward(response):\n"
        "    if response == 'endless':\n        await asyncio.Event().wait()\n"
        "    waiting.add(response)\n"
        "    if len(waiting) == 3:\n        full.set()\n"
        "    await full.wait()\n"
        "    return float(response)\n"
    )
    function = OwnFunction(tmp_path / "waits.py", "reward", 1)

    async def together() -> list[Any]:
        calls = [Call((text,), {}, 0.3 if text == "endless" else 60.0, 0) for text in ("1", "endless", "2", "3")]
        return await asyncio.gather(*map(function, calls), return_exceptions=True)

    found = asyncio.run(together())
    function.close()
    assert [value(found[place]) for place in (0, 2, 3)] == [1.0, 2.0, 3.0]
    assert isinstance(found[1], NotScored) and not found[1].fault


def test_modules_beside_the_file_are_imported_and_an_import_that_fails_says_where(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("right = 0.5\n")
    (tmp_path / "reward.py").write_text("import helpers\ndef reward(response):\n    return helpers.right\n")
    function = OwnFunction(tmp_path / "reward.py", "reward", 1)
    assert value(call(function, "")) == 0.5
    function.close()
    (tmp_path / "bad.py").write_text("print('hello')\nimport nowhere_at_all\ndef reward(response): ...\n")
    with pytest.raises(UnusableFunction, match=r"bad.py:2: import nowhere_at_all: ModuleNotFoundError.*\nhello"):
        OwnFunction(tmp_path / "bad.py", "reward", 1)
    (tmp_path / "exits.py").write_text("import os\ndef reward(response): ...\nos._exit(7)\n")
    with pytest.raises(UnusableFunction, match=r"its process ended while it was imported .exit code 7"):
        OwnFunction(tmp_path / "exits.py", "reward", 1)


RANK = """
import asyncio, sys, threading
from pathlib import Path
from megatron_rl.agent.scoring import Call
from megatron_rl.agent.own_process.function import OwnFunction

function = OwnFunction(Path(sys.argv[1]), "reward", 1)
print(int(asyncio.run(function(Call(("leaves",), {}, 60.0, 0))).value), flush=True)
asyncio.run(function(Call(("sleeps",), {}, 600.0, 0)))
"""


def test_everything_ends_with_a_rank_that_is_killed(function: OwnFunction, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SOURCE)
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path / "reward.py")], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    group = int(rank.stdout.readline())
    mine = [one.pid for one in psutil.Process(rank.pid).children(recursive=True)]
    assert alive(group) and len(mine) >= 3
    rank.kill()
    rank.communicate()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in mine if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left and not alive(group)


def test_close_ends_a_function_that_scores(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(SOURCE)
    function = OwnFunction(tmp_path / "reward.py", "reward", 2)

    async def closed() -> list[Any]:
        calls = [asyncio.ensure_future(function(Call(("sleeps",), {}, 600.0, 0))) for _ in range(5)]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(function.close)
        for each in calls:
            each.cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(closed())
    left = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # another test's process ends meanwhile
            left += [process] if str(tmp_path) in " ".join(process.cmdline()) else []
    assert left == []
