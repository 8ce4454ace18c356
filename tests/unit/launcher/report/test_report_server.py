"""The server of a page answers only on this machine, and only those who know its token."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from launcher.report.server import PageServer

PAGE = "<!doctype html><title>ä</title>"


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(PAGE) as found:
        yield found


def ask(
    server: PageServer, path: str = "/", method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode("utf-8")
    connection.close()
    return answer, text


def opened(server: PageServer) -> str:
    """Cookie of a browser that opened the address."""
    answer, text = ask(server, server.address.partition(str(server.port))[2])
    assert (answer.status, answer.getheader("Location"), text) == (303, "/", "")
    cookie = answer.getheader("Set-Cookie") or ""
    assert cookie.endswith("; Path=/; HttpOnly; SameSite=Strict")
    return cookie.partition(";")[0]


def test_the_address_gives_a_cookie_and_the_cookie_the_page(server):
    answer, text = ask(server, Cookie=opened(server))
    assert (answer.status, text) == (200, PAGE)
    assert answer.getheader("Cache-Control") == "no-store"


def test_a_page_that_did_not_change_is_not_sent_again(server):
    cookie = opened(server)
    tag = ask(server, Cookie=cookie)[0].getheader("ETag") or ""
    assert ask(server, Cookie=cookie, If_None_Match=tag)[0].status == 304
    server.page = PAGE + "new"
    answer, text = ask(server, Cookie=cookie, If_None_Match=tag)
    assert (answer.status, text) == (200, PAGE + "new")


def test_browsers_that_show_a_page_are_told_that_it_cannot_be_renewed(server):
    cookie = opened(server)
    tag = ask(server, Cookie=cookie)[0].getheader("ETag") or ""
    server.stale = True
    assert ask(server, Cookie=cookie, If_None_Match=tag)[0].status == 503
    answer, text = ask(server, Cookie=cookie)
    assert (answer.status, text) == (200, PAGE)


@pytest.mark.parametrize(
    "headers", [{}, {"Cookie": "mrl-report=x"}, {"Cookie": ';=;"{'}, {"Authorization": "Bearer x"}]
)
def test_nothing_is_said_without_the_token(server, headers):
    for path in ("/", "/?token=", "/?token=ü", "/?token=" + "a" * 43):
        answer, text = ask(server, path.replace("ü", "%C3%BC"), **headers)
        assert (answer.status, text) == (403, "open the address that mrl report printed\n")


def test_another_site_that_resolves_to_this_machine_is_refused(server):
    cookie = opened(server)
    for host in (f"evil.example:{server.port}", "[::1", ""):
        assert ask(server, Cookie=cookie, Host=host)[0].status == 403
    assert ask(server, Cookie=cookie, Host=f"localhost:{server.port}")[0].status == 200


def test_there_is_nothing_but_the_page(server):
    cookie = opened(server)
    assert ask(server, "/../../etc/passwd", Cookie=cookie)[0].status == 404
    assert ask(server, "/", "POST", Cookie=cookie)[0].status == 501


def test_the_server_listens_on_loopback_alone(server):
    assert server._server.server_address[0] == "127.0.0.1"
