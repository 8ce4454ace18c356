"""Reasons for which vLLM has gone."""

from __future__ import annotations

import os
import signal
import sys
from io import StringIO

from megatron_rl.vllm.process import VllmProcess

SLEEPS = "__import__('time').sleep(60)"
SILENT = "vLLM does not answer /pause"


def test_a_failed_call_is_explained_by_the_end_of_the_process() -> None:
    process = VllmProcess([sys.executable, "-c", SLEEPS], {**os.environ}, StringIO())
    try:
        process._process.send_signal(signal.SIGKILL)
        assert process.explained(SILENT).startswith("vLLM has ended (signal SIGKILL)")
    finally:
        process.end()


def test_a_failed_call_of_a_living_process_keeps_its_message() -> None:
    process = VllmProcess([sys.executable, "-c", SLEEPS], {**os.environ}, StringIO())
    try:
        assert process.explained(SILENT) == SILENT
    finally:
        process.end()
