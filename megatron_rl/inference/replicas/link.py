"""The connection to one start of one replica, from its first answer until it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.inference.api import GenerationRequest
from megatron_rl.inference.replicas.wire import (
    PROTOCOL,
    About,
    Garbled,
    News,
    decode_about,
    decode_news,
    encode_request,
)

logger = logging.getLogger(__name__)

REFUSED = {
    400: "does not understand us",
    401: "refuses the run's token",
    409: "is of another start of the run",
    503: "has stopped",
}
NOT_THERE = 424
"""What is asked for has not come to the replica: the only failure that says nothing against it."""


class ReplicaGone(RuntimeError):
    """A replica does not answer; the message says which, and how."""


class ReplicaRefuses(ReplicaGone):
    """A replica answers, and not as one of this run should."""


class Pace(NamedTuple):
    """How fast a replica decodes: what its samples were given, and in how long."""

    tokens: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> Pace:
        return Pace(self.tokens + tokens, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class LinkTimings:
    """How long a replica is waited for, in seconds."""

    poll_s: float = 5.0
    """That it may wait for news before it says that there are none: it is asked as often, whatever it has to do."""
    silence_s: float = 15.0
    """That it may be late with an answer, or nobody may listen at its address."""
    retry_s: float = 0.2
    """Between two tries to reach it."""
    look_s: float = 1.0
    """Between two looks for replicas that have come up."""
    say_s: float = 30.0
    """Between two lines of the log that say what is waited for."""


class ReplicaLink:
    """One driver's side. All of it is for one asyncio loop."""

    def __init__(
        self,
        address: ReplicaAddress,
        token: str,
        digest: str,
        driver: int,
        timings: LinkTimings,
        heard: Callable[[ReplicaLink, News], None],
    ) -> None:
        """heard: told all news, in their order, and once."""
        self.address = address
        self.about: About | None = None
        """As it said of itself the last time; None: it has not been reached yet."""
        self.outstanding = 0
        """Tokens that this driver waits for."""
        self.pace = Pace()
        self.progressed = time.monotonic()
        """When it last had tokens for us."""
        self.busy: tuple[float, float] | None = None
        """When it last had news, and for how many seconds it had computed by then."""
        self.slow = False
        """Whether others are asked rather than this one, until there are new weights."""
        self._common = {"protocol": PROTOCOL, "digest": digest, "driver": driver}
        self._timings = timings
        self._heard = heard
        self._ask: list[GenerationRequest] = []
        self._cancel: list[str] = []
        self._to_say = asyncio.Event()
        self._version = 0
        self._client = httpx.AsyncClient(
            base_url=f"http://{address.host}:{address.port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=timings.silence_s,
            trust_env=False,  # a proxy of the environment does not lead to the job's own nodes
            verify=False,  # no TLS here: certificates would be read every second that one is gone, for 20 ms each time
        )

    @property
    def name(self) -> str:
        """For people."""
        return f"replica {self.address.replica} (start {self.address.start}, {self.address.host}:{self.address.port})"

    @property
    def version(self) -> int:
        """Of its weights; -1: it has none yet."""
        return -1 if self.about is None or self.about.version is None else self.about.version

    def ask(self, request: GenerationRequest, version: int) -> None:
        """Have it answered, by weights of this version."""
        if not self.outstanding:
            self.progressed = time.monotonic()
        self._ask.append(request)
        self._version = version
        self._to_say.set()

    def cancel(self, request_id: str) -> None:
        """Have it forget a request."""
        self._cancel.append(request_id)
        self._to_say.set()

    async def run(self) -> None:
        """Speak and listen. Raises ReplicaGone when it is lost."""
        try:
            self.about = decode_about(await self.post("hello", {}))
            logger.info("%s of %d ranks is there", self.name, self.about.ranks)
            tasks = [asyncio.ensure_future(self._speak()), asyncio.ensure_future(self._listen())]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except ValueError as error:  # Garbled, or of no request of ours
            raise self._refuses(error) from error
        finally:
            await self._client.aclose()

    async def call(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Have it do something, and take in how it is then: after a swap the next request need not wait for news of it.
        See `post`."""
        said = await self.post(path, body, timeout_s)
        try:
            self.about = decode_about(said)
        except Garbled as error:
            raise self._refuses(error) from error
        return said

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Its answer. What it is asked for is the same where it comes twice, so it is asked again where the connection
        breaks, for as long as it may be silent. Raises ReplicaGone.

        timeout_s: that it may take, beside `LinkTimings.silence_s`.
        """
        limit = self._timings.silence_s + (timeout_s or 0.0)
        give_up = time.monotonic() + limit
        while True:
            if self._client.is_closed:  # by `run`, while this waited to try again
                raise ReplicaGone(f"{self.name} is gone")
            try:
                response = await self._client.post(f"/{path}", json=self._common | body, timeout=limit)
            except httpx.ConnectError as error:
                raise ReplicaGone(f"{self.name} is gone: nobody listens there any more") from error
            except httpx.TransportError as error:
                if isinstance(error, httpx.TimeoutException) or time.monotonic() > give_up:
                    raise ReplicaGone(f"{self.name} has been silent for {limit:g} s") from error
                await asyncio.sleep(self._timings.retry_s)
                continue
            return self._content(response)

    def _content(self, response: httpx.Response) -> dict[str, Any]:
        code, text = response.status_code, response.text[:200]
        if code == NOT_THERE:
            raise ReplicaGone(f"{self.name}: {text}")
        if not response.is_success:
            raise ReplicaRefuses(f"{self.name} {REFUSED.get(code, f'fails with HTTP {code}')}: {text}")
        try:
            content = response.json()
        except ValueError as error:
            raise self._refuses(error) from error
        if not isinstance(content, dict):
            raise self._refuses(text)
        return content

    def _refuses(self, why: object) -> ReplicaRefuses:
        return ReplicaRefuses(f"{self.name} answers what it should not: {why}")

    async def _speak(self) -> None:
        while True:
            await self._to_say.wait()
            self._to_say.clear()
            asked, self._ask = self._ask, []
            cancelled, self._cancel = self._cancel, []
            body = {"version": self._version, "requests": [*map(encode_request, asked)], "cancel": cancelled}
            await self.post("ask", body)

    async def _listen(self) -> None:
        seen = 0
        while True:
            body = {"seen": seen, "wait_s": self._timings.poll_s}
            news = decode_news(await self.post("news", body, timeout_s=self._timings.poll_s))
            self.about, seen = news.about, news.last
            self.busy = time.monotonic(), news.about.busy_s
            self._heard(self, news)
