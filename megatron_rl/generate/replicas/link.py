"""The connection to one start of one replica, from its first response until it is lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.replicas.paces import DecodePace
from megatron_rl.generate.replicas.speeds import Report
from megatron_rl.generate.replicas.wire import PROTOCOL, About, Garbled, News, decode_about, decode_news, encode_request

logger = logging.getLogger(__name__)

REFUSED = {
    400: "does not understand the request",
    401: "refuses the run's token",
    409: "belongs to another start of the run",
    503: "has stopped",
}
"""Meaning of HTTP statuses of a replica."""
PUNCTUAL_S = 1.0
"""Seconds after the longest wait for news within which a replica that is well responds."""
NOT_THERE = 424
"""HTTP status of a replica that has not received what a request needs: the only failure that is not its own fault."""


class ReplicaGone(RuntimeError):
    """A replica does not respond; the message says which one, and why."""


class ReplicaRefuses(ReplicaGone):
    """A replica responds, but not as a replica of this run should."""


@dataclass(frozen=True, slots=True)
class LinkTimings:
    """Intervals and timeouts of the connection to a replica, in seconds."""

    poll_s: float = 5.0
    """Longest wait of a replica for news before it responds without any. So it gets a request at least this often."""
    silence_s: float = 15.0
    """Longest delay of a response, and longest time without a listener at its address."""
    retry_s: float = 0.2
    check_s: float = 1.0
    log_s: float = 30.0


class ReplicaLink:
    """One driver's end of the connection. All methods belong to one asyncio loop."""

    def __init__(
        self,
        address: ReplicaAddress,
        token: str,
        digest: str,
        driver: int,
        timings: LinkTimings,
        on_news: Callable[[ReplicaLink, News], None],
        on_state: Callable[[ReplicaLink], None],
    ) -> None:
        """
        on_news: called once with each piece of news, the oldest first.
        on_state: called before, and whenever else it has reported its state.
        """
        self.address = address
        self.about: About | None = None
        """State of the replica in its last response; None before the first."""
        self.outstanding = 0
        """Tokens of this driver's requests that remain to be computed."""
        self.pace = DecodePace()
        self.progressed = time.monotonic()
        self.report: Report | None = None
        """Report in its last news."""
        self.slow = False
        """Whether other replicas are preferred until there are new weights."""
        self._common = {"protocol": PROTOCOL, "digest": digest, "driver": driver}
        self._timings = timings
        self._on_news, self._on_state = on_news, on_state
        self._requests: list[GenerationRequest] = []
        self._cancelled: list[str] = []
        self._unsent = asyncio.Event()
        self._version = 0
        self._heard_at = -math.inf
        self._client = httpx.AsyncClient(
            base_url=f"http://{address.host}:{address.port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=timings.silence_s,
            trust_env=False,  # a proxy from the environment does not lead to the job's own nodes
            verify=False,  # plain HTTP: reading certificates would take 20 ms of every attempt to reach a lost replica
        )

    @property
    def name(self) -> str:
        return f"replica {self.address.replica} (start {self.address.start}, {self.address.host}:{self.address.port})"

    @property
    def start(self) -> tuple[int, int]:
        """(replica, number of its earlier starts)"""
        return self.address.replica, self.address.start

    @property
    def version(self) -> int:
        """Policy version of its weights; -1 before the first ones."""
        return -1 if self.about is None or self.about.version is None else self.about.version

    @property
    def responds(self) -> bool:
        """Whether it has responded within the longest wait for news."""
        return self.about is not None and time.monotonic() - self._heard_at <= self._timings.poll_s + PUNCTUAL_S

    @property
    def asleep(self) -> bool:
        return self.about is not None and self.about.state == "asleep"

    @property
    def rests(self) -> bool:
        """Whether it is asleep or down, so that nothing is expected of it."""
        return self.about is not None and self.about.state != "awake"

    def ready(self, version: int) -> bool:
        """Whether it has weights of this version or a newer one, and may be asked at any moment."""
        return self.about is not None and not self.rests and self.version >= version

    def ask(self, request: GenerationRequest, version: int) -> None:
        if not self.outstanding:
            self.progressed = time.monotonic()
        self._requests.append(request)
        self._version = version
        self._unsent.set()

    def cancel(self, request_id: str) -> None:
        self._cancelled.append(request_id)
        self._unsent.set()

    async def run(self) -> None:
        """Send requests and receive news. Raises ReplicaGone when the replica is lost."""
        try:
            about = decode_about(await self.post("hello", {}))
            self._learn(about)
            logger.info("%s of %d ranks has started", self.name, about.ranks)
            tasks = [asyncio.ensure_future(self._send_requests()), asyncio.ensure_future(self._receive_news())]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except ValueError as error:  # Garbled, or an answer to no request of ours
            raise self._refuses(error) from error
        finally:
            await self._client.aclose()

    async def call(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Make it execute a command, and note its new state: after a swap it can get requests immediately. See
        `post`."""
        content = await self.post(path, body, timeout_s)
        try:
            self._learn(decode_about(content))
        except Garbled as error:
            raise self._refuses(error) from error
        return content

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Return the response. Retries while the connection breaks, for as long as the replica may be silent; repeating
        a request changes nothing. Raises ReplicaGone.

        timeout_s: seconds that the command may take, in addition to `LinkTimings.silence_s`.
        """
        limit = self._timings.silence_s + (timeout_s or 0.0)
        give_up = time.monotonic() + limit
        while True:
            if self._client.is_closed:  # `run` has ended during the pause
                raise ReplicaGone(f"{self.name} is gone")
            try:
                response = await self._client.post(f"/{path}", json=self._common | body, timeout=limit)
            except httpx.ConnectError as error:
                raise ReplicaGone(f"{self.name} is gone: nothing listens at its address any more") from error
            except httpx.TransportError as error:
                if isinstance(error, httpx.TimeoutException) or time.monotonic() > give_up:
                    raise ReplicaGone(f"{self.name} has been silent for {limit:g} s") from error
                await asyncio.sleep(self._timings.retry_s)
                continue
            except httpx.RequestError as error:  # a body that is not packed as its head says, a redirection
                raise self._refuses(f"{error!r}") from error
            return self._content(response)

    def _learn(self, about: About) -> None:
        self.about, self._heard_at = about, time.monotonic()
        self._on_state(self)

    def _content(self, response: httpx.Response) -> dict[str, Any]:
        code, text = response.status_code, response.text[:200]
        if code == NOT_THERE:
            raise ReplicaGone(f"{self.name}: {text}")
        if not response.is_success:
            raise ReplicaRefuses(f"{self.name} {REFUSED.get(code, f'fails with HTTP {code}')}: {text}")
        try:
            content = bounded_json(response.content)
        except ValueError as error:
            raise self._refuses(error) from error
        if not isinstance(content, dict):
            raise self._refuses(text)
        return content

    def _refuses(self, why: object) -> ReplicaRefuses:
        return ReplicaRefuses(f"{self.name} violates the protocol: {why}")

    async def _send_requests(self) -> None:
        while True:
            await self._unsent.wait()
            self._unsent.clear()
            asked, self._requests = self._requests, []
            cancelled, self._cancelled = self._cancelled, []
            body = {"version": self._version, "requests": [*map(encode_request, asked)], "cancel": cancelled}
            await self.post("ask", body)

    async def _receive_news(self) -> None:
        seen = 0
        while True:
            body = {"seen": seen, "wait_s": self._timings.poll_s}
            news = decode_news(await self.post("news", body, timeout_s=self._timings.poll_s))
            self._learn(news.about)
            seen = news.last
            self.report = Report(time.monotonic(), news.about)
            self._on_news(self, news)
