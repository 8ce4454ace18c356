"""Many inference replicas in memory, in place of HTTP, with scripted faults.

    link.post("ask", ...)    ->  ClientInMemory, ReplicaFleet  ->  ReplicaInMemory, in the loop of the driver's links
    link.post("news", ...)   <-  some tokens of each sample every `pace_s` seconds

An answer is a function of its request. Faults begin when the fleet has delivered a number of pieces with a version.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from json import dumps, loads
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import httpx

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import write
from megatron_rl.generate.engine.interface import Delta, GenerationRequest
from megatron_rl.generate.replicas.wire import (
    OTHER_VERSION,
    PROTOCOL,
    About,
    News,
    Refusal,
    decode_request,
    encode_news,
)

PIECE = 4
"""Tokens of a sample in one piece of news."""
LOST_EVERY = 5
"""Responses of a lossy replica, of which the last is lost on its way."""

Body = Mapping[str, Any]

Happening = Literal["dies", "hangs", "wakes", "starts again"]
"""dies: with its next piece that leaves an answer unfinished. hangs: answers nothing any more. wakes: answers again,
with all its news. starts again: as another process, without weights."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a replica while the fleet samples with a version, after this many pieces of it."""

    version: int
    pieces: int
    replica: int
    kind: Happening


def checksum(prompt: Sequence[int]) -> int:
    return zlib.crc32(bytes(prompt))


def too_long(prompt: Sequence[int]) -> bool:
    """Whether every replica refuses the prompt."""
    return checksum(prompt) % 37 == 0


def tokens_of(prompt: Sequence[int], sample: int, longest: int) -> list[int]:
    """Return an answer. The first token of all answers to a quarter of the prompts is the same."""
    seed = checksum(prompt)
    length = 1 + (seed // 7 + 5 * sample * sample) % longest
    first = 0 if seed % 4 == 0 else sample % 2
    return [first, *((seed + 7 * sample + place * place) % 13 for place in range(1, length))]


def logprobs_of(key: int, sample: int, count: int) -> list[float]:
    """Return log-probs that fp32 holds exactly, by which a reader knows the key of the request."""
    return [-((key + 7 * sample + place) % 1024) / 64 for place in range(count)]


class Sampled:
    """One request on its way to its answer."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        longest, samples = request.sampling.max_new_tokens, range(request.num_samples)
        self._whole = [tokens_of(request.prompt_tokens, sample, longest) for sample in samples]
        self._done = [len(request.known[sample].tokens) if sample in request.known else 0 for sample in samples]
        self._open = {*samples}
        for sample, known in request.known.items():
            logprobs = logprobs_of(request.key, sample, len(known.tokens))
            assert (known.tokens, known.logprobs) == (self._whole[sample][: len(known.tokens)], logprobs), request

    @property
    def answered(self) -> bool:
        return not self._open

    def next(self, version: int) -> list[Delta]:
        """Return the next tokens of each sample that is not complete."""
        deltas = []
        for sample in sorted(self._open):
            whole, begin = self._whole[sample], self._done[sample]
            end = self._done[sample] = min(len(whole), begin + PIECE)
            logprobs = logprobs_of(self.request.key, sample, end)[begin:]
            reason: Any = None
            if end == len(whole):
                self._open.remove(sample)
                reason = "length" if end == self.request.sampling.max_new_tokens else "stop"
            deltas.append(Delta(sample, whole[begin:end], logprobs, [version] * (end - begin), finish_reason=reason))
        return deltas


@dataclass
class Desk:
    """Requests of one driver to a replica, and its unseen news. Belongs to the loop of the driver's links."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    asked: dict[str, Sampled] = field(default_factory=dict)
    unseen: list[tuple[int, tuple[str, Delta] | Refusal]] = field(default_factory=list)
    last: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, *items: tuple[str, Delta] | Refusal) -> None:
        for item in items:
            self.last += 1
            self.unseen.append((self.last, item))
        self.news.set()


class ReplicaInMemory:
    """One start of one replica: the protocol of `wire`, from the side of the replica."""

    def __init__(self, fleet: ReplicaFleet, number: int, start: int, pace_s: float) -> None:
        self.number, self.start = number, start
        self.version: int | None = None
        self.there = self.speaks = True
        self.dies_next = False
        self._fleet, self._pace_s = fleet, pace_s
        self._desks: dict[int, Desk] = {}
        self._sampled = 0
        self._state = asdict(About(number, start, 1, None, 0, 0, 0.0, 0, 0.0))

    async def answer(self, path: str, body: Body) -> dict[str, Any]:
        desk = self._desks.get(body["driver"])
        if path == "/hello" or desk is None:
            desk = self._desks[body["driver"]] = Desk()
        if path == "/ask":
            self._ask(desk, body)
        elif path == "/news":
            return await self._news(desk, body)
        elif path == "/swap":
            self._swap(body["version"])
        return {"about": self._about()}

    def end(self) -> None:
        """Die: connections break, and nothing listens any more."""
        self.there = False
        self.wake()

    def wake(self) -> None:
        """Make all waits for news return. Called from any thread."""
        for desk in [*self._desks.values()]:
            with suppress(RuntimeError):  # the driver has left, and its loop is closed
                desk.loop.call_soon_threadsafe(desk.news.set)

    def _ask(self, desk: Desk, body: Body) -> None:
        for request in map(decode_request, body["requests"]):
            if self.version is None or self.version < body["version"]:
                desk.tell(Refusal(request.id, OTHER_VERSION, f"the weights are of version {self.version}"))
            elif too_long(request.prompt_tokens):
                desk.tell(Refusal(request.id, "prompt too long", "too long"))
            elif request.id not in desk.asked:  # a request may arrive twice
                desk.asked[request.id] = Sampled(request)
                self._fleet.counts["requests"] += 1
                self._fleet.counts["resumed"] += bool(request.known)
                desk.loop.call_later(self._pace_s, self._sample, desk, request.id)
        for request_id in body["cancel"]:
            desk.asked.pop(request_id, None)

    def _sample(self, desk: Desk, request_id: str) -> None:
        if not self.there or (work := desk.asked.get(request_id)) is None:
            return
        if self._fleet.rests:
            desk.loop.call_later(self._pace_s, self._sample, desk, request_id)
            return
        assert self.version is not None
        deltas = work.next(self.version)
        self._sampled += sum(len(delta.tokens) for delta in deltas)
        desk.tell(*((request_id, delta) for delta in deltas))
        self._fleet.count_piece(self.version)
        if not work.answered:
            desk.loop.call_later(self._pace_s, self._sample, desk, request_id)
            if self.dies_next:
                self._fleet.counts["died in an answer"] += 1
                self.end()

    async def _news(self, desk: Desk, body: Body) -> dict[str, Any]:
        desk.unseen = [each for each in desk.unseen if each[0] > body["seen"]]
        if not desk.unseen:
            desk.news.clear()
            in_time = desk.loop.call_later(body["wait_s"], desk.news.set)
            await desk.news.wait()
            in_time.cancel()
        items = [item for _, item in desk.unseen]
        pieces = [item for item in items if not isinstance(item, Refusal)]
        refused = [item for item in items if isinstance(item, Refusal)]
        if not items:
            return {"about": self._about(), "last": desk.last, "pieces": [], "refused": []}
        return encode_news(News(About(**self._about()), desk.last, pieces, refused))

    def _swap(self, version: int) -> None:
        if self.version != version:
            self.version = version
            self._fleet.begin(version)
            self.wake()

    def _about(self) -> dict[str, Any]:
        running = sum(len(desk.asked) for desk in [*self._desks.values()])
        return self._state | {"version": self.version, "running": running, "sampled": self._sampled}


class ReplyInMemory(NamedTuple):
    """Successful response, with what a link reads of `httpx.Response`."""

    content: bytes
    text: str = ""
    status_code: int = 200
    is_success: bool = True


class ClientInMemory:
    """Connection of a driver to a replica, with what a link uses of `httpx.AsyncClient`, which takes five times as long
    to pass on a small message as both ends to handle it. Requests and responses travel as JSON."""

    is_closed = False

    def __init__(self, fleet: ReplicaFleet, replica: ReplicaInMemory) -> None:
        self._fleet, self._replica = fleet, replica

    async def post(self, path: str, *, json: Body, timeout: float) -> ReplyInMemory:
        if "requests" in json:
            json = loads(dumps(json))
        content = await self._fleet.post(self._replica, path, json, timeout)
        return ReplyInMemory(dumps(content).encode())

    async def aclose(self) -> None:
        self.is_closed = True


class ReplicaFleet:
    """The replicas of an attempt, each in its present and its earlier starts."""

    def __init__(
        self,
        attempt: Attempt,
        replicas: int,
        *,
        digest: str,
        faults: Sequence[Fault] = (),
        pace_s: Callable[[int], float] = lambda replica: 0.002,
        lossy: Callable[[int], bool] = lambda replica: False,
    ) -> None:
        """
        pace_s: seconds between two pieces of a replica.
        lossy: whether responses of a replica are lost now and then, after it has done what was asked.
        """
        self.counts: Counter[str] = Counter()
        self.rests = False
        """Whether it samples nothing for the moment."""
        self._attempt, self._digest, self._pace_s, self._lossy = attempt, digest, pace_s, lossy
        self._starts: dict[int, list[ReplicaInMemory]] = {}
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._version, self._pieces = -1, 0
        self._lock = threading.RLock()
        self._responses = itertools.count()
        for number in range(replicas):
            self.start(number)
        for fault in faults:
            self.at(fault.version, fault.pieces, partial(self._happen, fault))

    def at(self, version: int, pieces: int, event: Callable[[], object]) -> None:
        """Let something happen once the fleet has delivered this many pieces with a version, or begins a later one."""
        self._events.append((version, pieces, event))
        self._events.sort(key=itemgetter(0, 1))

    def start(self, number: int) -> None:
        earlier = self._starts.setdefault(number, [])
        start = len(earlier)
        earlier.append(ReplicaInMemory(self, number, start, self._pace_s(number)))
        files = self._attempt.replica(number)
        files.folder.mkdir(parents=True, exist_ok=True)
        address = ReplicaAddress(number, start, f"replica-{number}", 1 + start, 1, self._digest, PROTOCOL, 0.0)
        write(files.listener, address, durable=False)

    def client(self, base_url: str, **_: object) -> ClientInMemory:
        """Connect a driver to a replica, in place of `httpx.AsyncClient`."""
        url = httpx.URL(base_url)
        number, start = int(url.host.removeprefix("replica-")), (url.port or 0) - 1
        return ClientInMemory(self, self._starts[number][start])

    async def post(self, replica: ReplicaInMemory, path: str, body: Body, limit_s: float) -> dict[str, Any]:
        """Raises httpx.TransportError."""
        await self._reach(replica, limit_s)
        content = await replica.answer(path, body)
        if not replica.speaks:
            await self._reach(replica, limit_s)
        if not replica.there:
            raise httpx.ReadError("the connection broke")
        if self._lossy(replica.number) and next(self._responses) % LOST_EVERY == 0:
            self.counts["lost responses"] += 1
            raise httpx.ReadError("the connection broke")
        return content

    async def _reach(self, replica: ReplicaInMemory, limit_s: float) -> None:
        """Raises TransportError if nothing listens, or if the replica says nothing for that long."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + limit_s
        while replica.there and not replica.speaks:
            if loop.time() > give_up:
                raise httpx.ReadTimeout("silent")
            await asyncio.sleep(0.05)
        if not replica.there:
            raise httpx.ConnectError("nothing listens")

    # Events, which any driver's thread may bring about

    def begin(self, version: int) -> None:
        """Note that a replica samples with a version now."""
        with self._lock:
            if version > self._version:
                self._version, self._pieces = version, 0
                self._let_happen()

    def count_piece(self, version: int) -> None:
        with self._lock:
            self._pieces += version == self._version
            self._let_happen()

    def _let_happen(self) -> None:
        while self._events and self._events[0][:2] <= (self._version, self._pieces):
            self._events.pop(0)[2]()

    def _happen(self, fault: Fault) -> None:
        self.counts[fault.kind] += 1
        replica = self._starts[fault.replica][-1]
        match fault.kind:
            case "dies":
                replica.dies_next = True
            case "hangs":
                replica.speaks = False
            case "wakes":
                replica.speaks = True
            case "starts again":
                replica.end()
                self.start(fault.replica)
