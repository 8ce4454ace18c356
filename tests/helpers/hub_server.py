"""A stand-in for the Hugging Face hub on loopback: the part of its API that huggingface_hub needs to create a
repository and a branch, upload files with Git LFS, and commit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

WRITE, READ = "hf_write", "hf_read"
"""Tokens of the user `me`: one may write to repositories of `me`, the other to none."""


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[tuple[str, str]] = field(default_factory=list)
    """(branch, subject) of each."""

    def sha(self, branch: str) -> str:
        made = [subject for where, subject in self.commits if where == branch]
        return hashlib.sha1(json.dumps([branch, made]).encode()).hexdigest()


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """`url` for HF_ENDPOINT; `repositories` of each type by name."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Repository]] = {"models": {}, "datasets": {}, "spaces": {}}
        self.stored: dict[str, bytes] = {}
        """Large files by their SHA-256, in a commit or not."""
        self.room: int | None = None
        """Large files that are still accepted; None: any number."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def do_HEAD(self) -> None:
                self._serve()

            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def do_PUT(self) -> None:
                self._serve()

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                path = unquote(urlsplit(self.path).path)
                status, answer, headers = hub.answer(self.command, path, body, token)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()

    @property
    def models(self) -> dict[str, Repository]:
        return self.repositories["models"]

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any, dict[str, str]]:
        if token not in (WRITE, READ) and not path.startswith("/lfs/"):
            return 401, {"error": "Invalid username or password."}, {}
        if path.startswith("/lfs/"):
            return self._store(path.removeprefix("/lfs/"), body)
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(body))
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(*found.groups())
        if found := re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/([a-z]+)/([^/]+))?(?:/.*)?", path):
            return self._repository(method, body, token, *found.groups())
        return 404, {"error": f"the stand-in does not know {method} {path}"}, {}

    def _create(self, asked: dict[str, Any], token: str) -> tuple[int, Any, dict[str, str]]:
        owner = asked.get("organization") or "me"
        name = f"{owner}/{asked['name']}"
        if owner != "me" or token != WRITE:
            return 403, {"error": "You don't have the rights to create a model under this namespace"}, {}
        url = {"url": f"{self.url}/{name}"}
        if name in self.models:
            return 409, {"error": "You already created this model repo", **url}, {}
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.models[name] = Repository(private)
        return 200, url, {}

    def _repository(
        self, method: str, body: bytes, token: str, kind: str, name: str, what: str | None, revision: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        repository = self.repositories[kind].get(name)
        if repository is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        branch = revision or "main"
        if method == "POST" and (token != WRITE or not name.startswith("me/")):
            return 403, {"error": "You have read access but not the required permissions for this operation"}, {}
        if what == "branch":
            known = branch in repository.branches
            repository.branches.setdefault(branch, dict(repository.branches["main"]))
            return (409 if known else 200), {}, {}
        if branch not in repository.branches:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        files = repository.branches[branch]
        if what == "preupload":
            return 200, {"files": [_mode(one["path"], files) for one in json.loads(body)["files"]]}, {}
        if what == "commit":
            return self._commit(repository, name, branch, [json.loads(line) for line in body.splitlines()])
        if what == "tree":
            return (
                200,
                [{"type": "file", "path": path, "size": len(text), "oid": "0" * 40} for path, text in files.items()],
                {},
            )
        siblings = [{"rfilename": path} for path in files]
        return 200, {"id": name, "sha": repository.sha(branch), "private": repository.private, "siblings": siblings}, {}

    def _commit(
        self, repository: Repository, name: str, branch: str, lines: list[dict[str, Any]]
    ) -> tuple[int, Any, dict[str, str]]:
        files = dict(repository.branches[branch])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            else:
                del files[value["path"]]
        repository.branches[branch] = files
        repository.commits.append((branch, lines[0]["value"]["summary"]))
        sha = repository.sha(branch)
        return 200, {"success": True, "commitOid": sha, "commitUrl": f"{self.url}/{name}/commit/{sha}"}, {}

    def _batch(self, asked: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        objects = []
        for one in asked["objects"]:
            upload = {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}
            objects.append(one | ({} if one["oid"] in self.stored else {"actions": upload}))
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _store(self, oid: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        if self.room == 0:
            return 400, {"error": "no more room"}, {}
        assert hashlib.sha256(body).hexdigest() == oid
        self.stored[oid] = body
        self.room = self.room - 1 if self.room is not None else None
        return 200, {}, {}

    def _file(self, name: str, revision: str, path: str) -> tuple[int, Any, dict[str, str]]:
        repository = self.models[name]
        content = repository.branches[revision].get(path)
        if content is None:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        return 200, content, {"ETag": f'"{git_oid(content)}"', "X-Repo-Commit": repository.sha(revision)}


def _mode(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    large = path.endswith(".safetensors")
    there = files.get(path)
    oid = None if there is None else hashlib.sha256(there).hexdigest() if large else git_oid(there)
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
