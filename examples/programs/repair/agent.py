"""An agent that mends a repository with a failing test, by a shell, in a container. Standard library only.

The model answers with one command in a block of ```sh; the agent runs it and shows the output. An answer without a
block ends the work. The reward is 1 if the tests pass then, with the tests as they were given.
Commands of the model are root in the container: one could replace python3, which this example does not prevent.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

MOST_COMMANDS = 8
COMMAND_S = 20
SHOWN = 1500  # characters of a command's output, from its end
PR_SET_DUMPABLE = 4

TASK = """\
The test of the repository in the current directory fails: {test}
Answer with one shell command in a block of ```sh; you see its output. When the test passes, answer: done."""


def main() -> None:
    # Commands of the model run with the same rights. Otherwise one could write a reward into this process's output.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    problem = json.loads(sys.stdin.readline())
    repository = Path("repository").absolute()
    write(repository, problem["files"])
    messages = [{"role": "user", "content": TASK.format(test=problem["test"])}]
    commands = 0
    while commands < MOST_COMMANDS:
        answer = ask(messages)
        block = re.search(r"```sh\n(.*?)```", answer, re.DOTALL)
        messages.append({"role": "assistant", "content": answer})
        if block is None:
            break
        commands += 1
        messages.append({"role": "user", "content": run(["sh", "-c", block[1]], repository)[1]})
    write(repository, {name: text for name, text in problem["files"].items() if name.startswith("test")})
    code, output = run(problem["test"].split(), repository)
    print(output)
    print(json.dumps({"reward": float(code == 0), "commands": commands}))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def ask(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def run(command: list[str], folder: Path) -> tuple[int, str]:
    without_key = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=without_key,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        return 1, f"not done within {COMMAND_S} s"
    return done.returncode, done.stdout.decode(errors="replace")[-SHOWN:] + f"[exit code {done.returncode}]"


main()
