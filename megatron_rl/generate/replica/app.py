"""HTTP routes of a replica, see `inference.replicas.wire`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.generate.engine.engine_thread import EngineGone
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.replica.driver_inbox import DriverInbox
from megatron_rl.generate.replica.lifecycle import BODY_BYTES, first_of
from megatron_rl.generate.replica.replica_leader import ReplicaLeader, TakesTurns
from megatron_rl.generate.replicas.wire import (
    PROTOCOL,
    About,
    AskBody,
    Garbled,
    News,
    NewsBody,
    ReceiveBody,
    SwapBody,
    decode,
    decode_request,
    encode_news,
)
from megatron_rl.generate.serving.access import read_body, with_token
from megatron_rl.generate.serving.api_errors import ApiError
from megatron_rl.generate.serving.error_responses import response_to

logger = logging.getLogger(__name__)

GONE_S = 60.0
"""Seconds without a request of the run's first rank, which sends one every few seconds, after which the run is over."""
LEFT_S = 2.0
"""The same for a replica that was asked to leave."""

Body = dict[str, Any]
Handler = Callable[[Body], Awaitable[Body]]


class OtherRun(Exception):
    """A request comes from ranks with another configuration or protocol."""


class NotThere(Exception):
    """The requested weights have not arrived."""


class ReplicaService:
    """A replica that generates, as ranks of the run use it. Implements `Service`."""

    def __init__(self, leader: ReplicaLeader, address: ReplicaAddress, token: str) -> None:
        self.address = address
        self.app = application(self, token)
        self.heard_at: float | None = None
        """Time of the last request of the run's first rank (time.monotonic); None before the first."""
        self.attended = 0
        """Open requests of that rank; while it lives there is always one."""
        self.ended = asyncio.Event()
        self.engine = leader
        self._inbox = DriverInbox(leader.submit)
        self._transfer: asyncio.Future[None] | None = None  # of the newest weights
        self._asked: tuple[int, dict[str, Any] | None] | None = None  # version and epoch of that transfer
        self._receipts = asyncio.Lock()
        self._changes = asyncio.Lock()  # of the weights in use, and of whose turn it is

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    async def until_over(self, asked: asyncio.Event, limit_s: float) -> None:
        try:
            await first_of(self._until_over(asked, limit_s), self._inbox.deliver())
        finally:
            self._inbox.close()

    async def _until_over(self, asked: asyncio.Event, limit_s: float) -> None:
        began = time.monotonic()
        while not self.ended.is_set():
            heard = self.heard_at
            silent = 0.0 if self.attended else time.monotonic() - (began if heard is None else heard)
            if asked.is_set() and (heard is None or silent > LEFT_S):
                logger.info("the replica was asked to leave, and the run has left")
                return
            limit = limit_s if heard is None else GONE_S
            if silent > limit:
                logger.warning("the run has sent no request for %.0f s, so it is gone and this replica ends", silent)
                return
            # Requests meanwhile only postpone the end, so nothing is missed by sleeping until it would come.
            if asked.is_set():
                await first_of(self.ended.wait(), limit_s=LEFT_S - silent)
            else:
                await first_of(self.ended.wait(), asked.wait(), limit_s=limit - silent)

    def about(self) -> About:
        engine, its = self.engine, self.address
        load = engine.load
        return About(
            replica=its.replica,
            start=its.start,
            ranks=its.ranks,
            version=engine.version,
            running=load.running,
            waiting=load.waiting,
            cache_used=load.cache_used,
            preemptions=load.preemptions,
            busy_s=engine.busy_s,
            state="awake" if engine.turns is None else engine.turns.state,
            rested_s=0.0 if engine.turns is None else engine.turns.rested_s,
            sampled=self._inbox.sampled,
            drafted=load.drafted,
            accepted=load.accepted,
        )

    @property
    def handlers(self) -> dict[str, Handler]:
        return {
            "/hello": self._hello,
            "/ask": self._ask,
            "/news": self._news,
            "/start": self._start,
            "/sleep": self._sleep,
            "/receive": self._receive,
            "/swap": self._swap,
            "/end": self._end,
        }

    def check(self, body: Body) -> None:
        """Raise Garbled, or OtherRun if the body comes from ranks with another configuration or protocol."""
        if body.get("protocol") != PROTOCOL:
            raise OtherRun(f"protocol {body.get('protocol')}: this replica uses {PROTOCOL}")
        if body.get("digest") != self.address.digest:
            raise OtherRun(
                f"configuration {str(body.get('digest'))[:12]}: this replica runs {self.address.digest[:12]}"
            )
        if type(body.get("driver")) is not int:
            raise Garbled("driver is not a number")

    async def _hello(self, body: Body) -> Body:
        self._inbox.forget(body["driver"])
        return self._state()

    async def _ask(self, body: Body) -> Body:
        asked = decode(AskBody, body, "ask")
        requests = [decode_request(each) for each in asked.requests]
        version = -1 if self.engine.version is None else self.engine.version
        older = version if version < asked.version else None
        self._inbox.ask(body["driver"], requests, asked.cancel, older)
        return self._state()

    async def _news(self, body: Body) -> Body:
        asked = decode(NewsBody, body, "news")
        last, pieces, refused = await self._inbox.news(body["driver"], asked.seen, asked.wait_s)
        return encode_news(News(self.about(), last, [*pieces], [*refused]))

    async def _start(self, body: Body) -> Body:
        self._turns().start()
        return self._state()

    async def _sleep(self, body: Body) -> Body:
        async with self._changes:
            try:
                await self._turns().sleep()
            except RuntimeError as error:
                raise NotThere(f"it does not sleep: {error}") from error
        self._inbox.wake()
        return self._state()

    def _turns(self) -> TakesTurns:
        if (turns := self.engine.turns) is None:
            raise NotThere("this replica has its devices to itself")
        return turns

    async def _receive(self, body: Body) -> Body:
        wanted = decode(ReceiveBody, body, "receive")
        version, epoch = asked = wanted.version, wanted.epoch
        async with self._receipts:
            before = self._transfer
            if epoch is None and (before is None or (before.done() and before.exception())):
                raise NotThere("this replica is in no transfer group")
            # A request that is repeated, because its connection broke, must not join the same epoch a second time.
            if before is None or self._asked != asked or (epoch is None and before.done()):
                try:
                    self._transfer = await self.engine.receive(version, epoch)
                except RuntimeError as error:
                    raise NotThere(f"it does not receive version {version}: {error}") from error
                self._asked = asked
                self._transfer.add_done_callback(_log_failure)
        return self._state()

    async def _swap(self, body: Body) -> Body:
        wanted = decode(SwapBody, body, "swap")
        version, probe = wanted.version, None if wanted.probe is None else Probe.decode(wanted.probe)
        # The rank repeats a request whose connection broke, while the first one may still be loading. The second then
        # waits here, finds the version in use, and answers as the first would have. Without the lock, both would load
        # it, and the second would find the received weights already used.
        async with self._changes:
            if self.engine.version != version:
                if self._transfer is None:
                    raise NotThere("no weights were received")
                try:
                    await asyncio.shield(self._transfer)
                    await self.engine.swap(version, probe)
                except RuntimeError as error:
                    raise NotThere(f"version {version} did not arrive: {error}") from error
                self._inbox.wake()
        return self._state()

    async def _end(self, body: Body) -> Body:
        self.ended.set()
        return self._state()

    def _state(self) -> Body:
        return {"about": asdict(self.about())}


def _log_failure(transfer: asyncio.Future[None]) -> None:
    if not transfer.cancelled() and (error := transfer.exception()) is not None:
        logger.warning("the weights do not arrive: %s", error)


def _said(text: str, status: int) -> Response:
    """Return a response with a text, which may quote half a character."""
    return PlainTextResponse(text.encode("utf-8", "backslashreplace"), status)


def application(service: ReplicaService, token: str) -> ASGIApp:
    """Return the service as an ASGI application, which admits requests with the run's token."""

    def route(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                body = bounded_json(await read_body(request))
                if not isinstance(body, dict):
                    raise Garbled("the body is not a JSON object")
                service.check(body)
                first = body["driver"] == 0
                service.attended += first
                try:
                    content = await handler(body)
                finally:
                    service.attended -= first
                    if first:
                        service.heard_at = time.monotonic()
                return JSONResponse(content)
            except ApiError as error:
                return response_to(error)
            except OtherRun as error:
                return _said(str(error), 409)
            except NotThere as error:
                return _said(str(error), 424)
            except EngineGone as error:
                return _said(str(error), 503)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                return _said(repr(error), 400)

        return answer

    routes = [Route(path, route(handler), methods=["POST"]) for path, handler in service.handlers.items()]
    return with_token(Starlette(routes=routes), [token], BODY_BYTES)
