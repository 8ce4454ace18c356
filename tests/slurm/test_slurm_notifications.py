"""A job of Slurm notifies, and a webhook that never answers delays its end and its requeue by a limit."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from lab import Cluster, wait_until
from login import SECONDS, Login

DEMO = ("demo", "--cluster", "stub", "job.nodes=1", "job.gpus_per_node=2")
pytestmark = pytest.mark.slow


def address(lab: Cluster) -> str:
    """Address of this machine for the nodes."""
    found = re.search(r"NodeAddr=(10\.77\.\d+)\.", lab.conf.read_text())
    return f"{found[1]}.254" if found else "127.0.0.1"


@contextmanager
def answering(lab: Cluster) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook: its URL, and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((address(lab), 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{address(lab)}:{server.server_port}/", got
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def silent(lab: Cluster) -> Iterator[tuple[str, list[socket.socket]]]:
    """A webhook that accepts connections and never answers: its URL, and the connections."""
    kept: list[socket.socket] = []
    with socket.create_server((address(lab), 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    kept.append(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://{address(lab)}:{listener.getsockname()[1]}/", kept
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in kept:
                each.close()


def notify(login: Login, url: str, on: str) -> str:
    """Return an override with a webhook at `url`, and a command that adds the event to a file."""
    (login.home / "hook").write_text(url + "\n")
    command = f"echo $MRL_EVENT $MRL_ATTEMPT >>{login.home}/events"
    return f"notify={{webhook: {login.home}/hook, command: [sh, -c, '{command}'], on: [{on}]}}"


def events(login: Login) -> list[str]:
    return (login.home / "events").read_text().splitlines()


def test_a_finished_and_a_held_job_call_the_webhook_and_the_command(login: Login) -> None:
    with answering(login.lab) as (url, got):
        finished = login.submit(*DEMO, notify(login, url, "finished, held"))
        assert finished.wait() == "COMPLETED", finished.log()
        words = (*DEMO, "job.backoff_s=1", notify(login, url, "finished, held"))
        held = login.submit(*words, stub={"steps": 1000, "crash_at": 3})
        held.wait("FAILED")
    assert events(login) == ["finished 1", f"held {held.dir.last_attempt()}"]
    assert [(one["event"], one["run"]) for one in got] == [
        ("finished", finished.dir.root.name),
        ("held", held.dir.root.name),
    ]
    assert "RuntimeError: boom" in got[1]["text"]


def test_a_webhook_that_never_answers_delays_the_requeue_and_the_end_by_a_limit(login: Login) -> None:
    with silent(login.lab) as (url, kept):
        words = (*DEMO, "job.backoff_s=1", notify(login, url, "finished, restarted"))
        run = login.submit(*words, stub={"steps": 20, "checkpoint": 5, "crash_at": [10]})
        wait_until("it has crashed", run.ends, SECONDS)
        wait_until("it is back in the queue", lambda: run.state() == "PENDING", SECONDS)
        assert run.wait() == "COMPLETED", run.log()
        assert [outcome for outcome, _ in run.ends()] == ["crashed", "finished"], run.log()
        assert events(login) == ["restarted 1", "finished 2"]
        assert len(kept) == 2, "the webhook was called for both"
