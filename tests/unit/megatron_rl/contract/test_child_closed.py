"""Children are ended with all that they have started, within a limit."""

from __future__ import annotations

import os

from megatron_rl.contract.child import Child


def test_a_child_that_hangs_in_the_kernel_is_left_behind(monkeypatch, capsys):
    child = Child(["sleep", "100"], dict(os.environ))
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda pid, signum: None)
        patch.setattr(child._process, "kill", lambda: None)
        child.close(0.05)
    assert child.exit_code() is None
    assert capsys.readouterr().err == f"process {child.pid} does not end although it was killed\n"
    child.close()
