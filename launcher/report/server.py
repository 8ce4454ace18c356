"""Serves one page on this machine, to those who know its token."""

from __future__ import annotations

import hmac
import secrets
import threading
from hashlib import sha256
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""Names that a browser may use for the page. Any other name belongs to a site that resolves to this machine."""
TOKEN_BYTES = 32
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class PageServer:
    """Server of one page, which may be replaced. Its address contains a token; the first answer to it moves the token
    into a cookie, so that it is not in the history of the browser."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.stale = False
        """Whether the page could not be renewed. New browsers still get it; those that show it get an error."""
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self._server = ThreadingHTTPServer((HOST, 0), _Handler)
        self._server.daemon_threads = True
        self._server.pages = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self._token}"

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers share cookies between the ports of a host."""
        return f"mrl-report-{self.port}"

    def accepts(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8"), self._token.encode("utf-8"))

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_version = "mrl"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        pages: PageServer = self.server.pages  # type: ignore[attr-defined]
        if _host(self.headers.get("Host", "")) not in NAMES:
            return self._answer(HTTPStatus.FORBIDDEN, b"unknown host\n")
        address = urlsplit(self.path)
        if address.path != "/":
            return self._answer(HTTPStatus.NOT_FOUND, b"not found\n")
        token = parse_qs(address.query).get("token", [""])[0]
        if token and pages.accepts(token):
            cookie = f"{pages.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
            return self._answer(HTTPStatus.SEE_OTHER, b"", {"Location": "/", "Set-Cookie": cookie})
        if not pages.accepts(self._cookie(pages.cookie)):
            return self._answer(HTTPStatus.FORBIDDEN, b"open the address that mrl report printed\n")
        if pages.stale and "If-None-Match" in self.headers:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the page cannot be renewed\n")
        page = pages.page.encode("utf-8")
        tag = f'"{sha256(page).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag})
        return self._answer(HTTPStatus.OK, page, {"ETag": tag, "Content-Type": "text/html; charset=utf-8"})

    def log_message(self, format: str, *args: Any) -> None:
        """No log: requests contain the token."""

    def _cookie(self, name: str) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(name)
        except CookieError:
            return ""
        return found.value if found else ""

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "text/plain", **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _host(header: str) -> str | None:
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None
