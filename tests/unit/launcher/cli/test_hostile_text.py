"""A text of a model, a program or a rank cannot control the terminal of anyone who looks at a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from run_helpers import begin, end, submitted

from launcher.backends.child import ModuleProcess
from launcher.cli.chat import _Conversation
from launcher.cli.main import main
from launcher.cli.show.terminal import echo
from launcher.errors import BadInput
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.text import with_colours

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[31mred\x1b[0m \u202egnp.exe\x9b5n\r\x08"
CONTROLS = {"\x1b", "\x07", "\u202e", "\x9b", "\x08"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = submitted(tmp_path / "run")
    begin(run, 1)
    run.attempt(1).logs.mkdir(parents=True, exist_ok=True)
    run.attempt(1).log(0).write_text(f"a reward says {HOSTILE}\n", encoding="utf-8")
    return run


def test_a_log_keeps_its_colours_and_nothing_else_that_a_terminal_obeys(run: RunDir) -> None:
    done = CliRunner().invoke(main, ["logs", str(run.root)], color=True)  # as at a terminal
    assert (done.exit_code, "\x1b[31mred\x1b[0m" in done.output) == (0, True), done.output
    assert not CONTROLS & set(done.output.replace("\x1b[31m", "").replace("\x1b[0m", ""))
    told = json.loads(CliRunner().invoke(main, ["logs", str(run.root), "--json"]).output.splitlines()[0])
    assert HOSTILE[:20] in told["line"]


def test_the_reason_of_an_end_is_shown_escaped(run: RunDir) -> None:
    end(run, 1, "crashed", error=HOSTILE)
    for words in (["status"], ["explain"]):
        assert not CONTROLS & set(CliRunner().invoke(main, [*words, str(run.root)], color=True).output), words


def test_an_answer_and_a_refusal_in_a_chat_are_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    class Child:
        def said(self) -> Any:
            yield from ({"text": HOSTILE}, {"end": "stop"}, {"refused": HOSTILE})

        def send(self, text: str) -> None:
            pass

    talk = _Conversation(cast("ModuleProcess", Child()), None)
    talk._ask("Hello", keeps=True)
    talk._ask("Hello", keeps=True)
    shown = capsys.readouterr()
    assert "\\x1b]52;c;ZXZpbA==\\x07" in shown.out and "\\x1b]52" in shown.err
    assert not CONTROLS & set(shown.out + shown.err)
    assert talk._messages[-1]["content"] == HOSTILE, "the conversation keeps the text of the model"


def test_errors_and_progress_are_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    BadInput(f"{HOSTILE}: no such file").show()
    echo(HOSTILE)
    shown = capsys.readouterr()
    assert not CONTROLS & set(with_colours(shown.out + shown.err).replace("\x1b[31m", "").replace("\x1b[0m", ""))
    assert not CONTROLS & set(shown.err)
    assert "\\x1b]52" in shown.out
