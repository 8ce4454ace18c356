"""A stand-in for W&B's server on loopback: the part of its API that wandb needs to start and resume a run. A history is
kept by line number, as W&B does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class Shown:
    """One W&B run as a user of W&B sees it."""

    config: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    tags: list[str] = field(default_factory=list)
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    state: str = "running"
    preempting: bool = False

    def curve(self, metric: str) -> list[tuple[int, float]]:
        rows = [self.lines[number] for number in sorted(self.lines)]
        return [(row["_step"], row[metric]) for row in rows if metric in row]


class Server:
    """`url` for WANDB_BASE_URL; `runs` by id."""

    def __init__(self) -> None:
        self.runs: dict[str, Shown] = {}
        runs = self.runs

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer: dict[str, Any] = {}
                if self.path == "/graphql":
                    answer = {"data": _graphql(runs, json.loads(body))}
                elif self.path.endswith("/file_stream"):
                    _stream(runs[self.path.split("/")[-2]], json.loads(body))
                self._answer(answer)

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer({})

            def do_GET(self) -> None:
                self._answer({})

            def _answer(self, value: dict[str, Any]) -> None:
                text = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[Server]:
        Thread(target=self._http.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()


def _graphql(runs: dict[str, Shown], asked: dict[str, Any]) -> dict[str, Any]:
    given = asked.get("variables") or {}
    project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": "me"}}
    if "upsertBucket" in asked["query"]:
        shown = runs.setdefault(given["name"], Shown())
        shown.name = given["displayName"] or shown.name
        shown.tags = given["tags"] or shown.tags
        config = json.loads(given["config"] or "{}")
        shown.config |= {key: entry["value"] for key, entry in config.items() if key != "_wandb"}
        return {"upsertBucket": {"bucket": _bucket(given["name"], shown) | {"project": project}, "inserted": True}}
    if "RunResumeStatus" in asked["query"]:
        shown_before = runs.get(given["name"])
        return {"model": project | {"bucket": shown_before and _bucket(given["name"], shown_before)}}
    me = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
    files = {"runID": "r", "uploadHeaders": [], "files": []}
    return {"viewer": me, "serverInfo": {"features": []}, "createRunFiles": files}


def _bucket(name: str, shown: Shown) -> dict[str, Any]:
    last = shown.lines.get(len(shown.lines) - 1)
    return {
        "id": "r",
        "name": name,
        "displayName": shown.name,
        "config": json.dumps({key: {"value": value} for key, value in shown.config.items()}),
        "wandbConfig": json.dumps({"t": 1}),
        "tags": shown.tags,
        "historyLineCount": len(shown.lines),
        "historyTail": json.dumps([json.dumps(last)] if last else []),
        "eventsTail": "[]",
        "summaryMetrics": json.dumps(last or {}),
    } | dict.fromkeys(("eventsLineCount", "logLineCount"), 0)


def _stream(shown: Shown, sent: dict[str, Any]) -> None:
    history = sent.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
    for number, line in enumerate(history["content"], history["offset"]):
        shown.lines[number] = json.loads(line)
    shown.state = "running"
    shown.preempting |= sent.get("preempting", False)
    if sent.get("complete"):
        shown.state = "finished" if sent["exitcode"] == 0 else "preempted" if shown.preempting else "failed"
        shown.preempting = False
