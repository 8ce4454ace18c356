"""mrl chat as its users meet it: lines from a pipe, and a terminal in which Ctrl-C stops an answer."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path
from threading import Timer

import commands
import pytest
from hf_helpers import PUBLISHED, publish

from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE

MRL = str(commands.PROGRAMS["mrl"])
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a chat template that concatenates messages. Greedy answers do not end by themselves."""
    folder = tmp_path_factory.mktemp("published") / "hf"
    publish(folder, PUBLISHED["Qwen2"] | {"max_position_embeddings": 4096})
    return folder


def test_every_line_of_a_pipe_is_answered_and_continues_the_conversation(published: Path) -> None:
    words = [MRL, "chat", published, "--max-new-tokens", "5", "--temperature", "0", "--system", "9"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True) as chat:
        assert chat.stdin and chat.stdout
        ended = Timer(LIMIT_S, chat.kill)
        ended.start()

        def answer(message: str) -> str:
            assert chat.stdin and chat.stdout
            print(message, file=chat.stdin, flush=True)
            said = chat.stdout.readline()
            assert said.endswith(" ...\n"), "the limit must end it"
            return said.removesuffix(" ...\n")

        first, second = answer("12"), answer("34")
        assert answer("\n/clear\n12") == first, "a new conversation must not know the previous one"
        assert answer(f"/clear\n12{first}34") == second, "the prompt must contain both messages and the answer"
        rest = chat.communicate("/exit\n56\n")
        ended.cancel()
    assert (chat.returncode, *rest) == (EXIT_FINISHED, "", "")


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(published: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(MRL, ["mrl", "chat", str(published), "--temperature", "0", "--max-new-tokens", "4000"])
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + LIMIT_S
        while text not in shown:
            assert time.monotonic() < deadline, f"no {text!r} in {shown!r}"
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 65536)
        shown = shown.partition(text)[2]

    try:
        until(b"Ctrl-D ends the chat\r\n")
        until(b"> ")
        for _ in range(2):  # the second is answered like the first
            os.write(terminal, b"12\n")
            until(b"12\r\n")
            while len(shown) < 5:
                shown += os.read(terminal, 65536)
            os.write(terminal, b"\x03")
            until(b" ...\r\n")
            until(b"> ")
        os.write(terminal, b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_FINISHED
        pid = 0
    finally:
        if pid:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nothing"], "no such directory"), (["."], "neither a run"), (["x", "--top-p", "2"], "'--top-p'")],
)
def test_unusable_input_is_one_error_with_exit_code_2(tmp_path: Path, words: list[str], said: str) -> None:
    done = commands.run(["mrl", "chat", *words], LIMIT_S, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1
