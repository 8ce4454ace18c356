"""A vLLM that takes turns with training ranks on its devices, with stand-ins for its process and client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.generate.engine.interface import GenerationRequest, TokenScore
from megatron_rl.generate.refit.probe import Probe, ProbeFailed
from megatron_rl.generate.replica.app import NotThere, ReplicaService
from megatron_rl.generate.vllm import running, vllm_turns
from megatron_rl.generate.vllm.client import NewTokens, VllmStats
from megatron_rl.generate.vllm.process import VllmClosed, VllmGone, VllmRefused
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.generate.vllm.streams import Streams
from megatron_rl.generate.vllm.vllm_leader import VllmLeader
from megatron_rl.generate.vllm.vllm_turns import VllmTurns
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling

PROBE = Probe((1, 2), (-1.0,), 0.1)
EPOCH = {"number": 1}
LOADED = ["wake weights", "receive 7", "start update", "await 7", "load 7", "finish 7"]
USED = ["forget prefixes", "score", "wake cache"]


class Client:
    """Notes what is asked of vLLM, and answers at once by default."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails: dict[str, Exception] = {}
        """Request -> its error."""
        self.held: dict[str, asyncio.Event] = {}
        """Request -> set when it may be answered."""
        self.scores = [-1.0]
        self.tokens: asyncio.Queue[NewTokens] = asyncio.Queue()
        self.reached = 0

    async def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what in self.held:
            await self.held[what].wait()
        if what in self.fails:
            raise self.fails[what]

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self, tag: str) -> bool:
        await self._ask({"weights": "wake weights", "kv_cache": "wake cache"}[tag])
        return tag == "kv_cache"

    async def begin_receive(self, version: int, *_: Any) -> None:
        await self._ask(f"receive {version}")

    async def start_update(self) -> None:
        await self._ask("start update")

    async def update(self, version: int, *, load: bool) -> None:
        await self._ask(f"{'load' if load else 'await'} {version}")

    async def finish_update(self, version: int) -> None:
        await self._ask(f"finish {version}")

    async def forget_prefixes(self) -> None:
        await self._ask("forget prefixes")

    async def score(self, tokens: Any) -> list[TokenScore]:
        await self._ask("score")
        return [TokenScore(score, [], []) for score in self.scores]

    async def stats(self) -> VllmStats:
        await self._ask("stats")
        return VllmStats()

    async def reach_workers(self) -> None:
        self.reached += 1

    async def generate(self, *_: Any) -> AsyncGenerator[NewTokens, None]:
        self.asked.append("generate")
        try:
            while True:
                yield await self.tokens.get()
        finally:
            self.asked.append("end of generate")

    async def close(self) -> None:
        pass

    @property
    def control(self) -> list[str]:
        """Requests, without looks."""
        return [each for each in self.asked if each != "stats"]


class Start:
    """Implements `VllmStart`."""

    served = SimpleNamespace(socket="/none")

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.error: Exception | None = None
        self.begun = 0
        self.ended = False
        self.dead: Exception | None = None

    def begin(self) -> Any:
        self.begun += 1
        return SimpleNamespace(end=self._end, check=self._check, explained=lambda message: message)

    def _end(self) -> None:
        self.ended = True

    def _check(self) -> None:
        if self.dead is not None:
            raise self.dead

    async def answers(self, process: Any, goes_on: Callable[[], bool]) -> bool:
        await self.answered.wait()
        if self.error is not None:
            raise self.error
        return goes_on()


class Front:
    """A front whose vLLM starts at once, unless `start.answered` is cleared."""

    def __init__(self, *, sleeps: bool = True, sleeps_again: bool = True) -> None:
        self.start, self.client, self.beats = Start(), Client(), 0
        self.start.answered.set()
        activity: Any = SimpleNamespace(beat=self._beat, begin=lambda doing: None, doing="serving")
        self.vllm = RunningVllm(self.start, activity, 60.0)  # type: ignore[arg-type]
        self.vllm.client = self.client  # type: ignore[assignment]
        tokenizer: Any = SimpleNamespace(end_ids=[9], decode=lambda tokens: "")
        streams = Streams(self.vllm, tokenizer, 8)
        self.turns = VllmTurns(self.vllm, streams, {}, sleeps=sleeps, sleeps_again=sleeps_again)
        limits: Any = SimpleNamespace(check=lambda request: None)
        self.leader = VllmLeader(self.vllm, limits, streams, self.turns)
        self.service = ReplicaService(self.leader, ReplicaAddress(0, 0, "", 0, 1, "", 1, 0.0), "token")

    def _beat(self) -> None:
        self.beats += 1

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        about: dict[str, Any] = (await self.service.handlers[f"/{path}"](body))["about"]
        return about

    async def receive(self, version: int = 7, epoch: dict[str, Any] | None = EPOCH) -> dict[str, Any]:
        return await self.post("receive", version=version, epoch=epoch)

    async def swap(self, version: int = 7, probe: Probe | None = PROBE) -> dict[str, Any]:
        return await self.post("swap", version=version, probe=None if probe is None else probe.encode())

    async def awake(self) -> Front:
        await self.post("start")
        await self.post("sleep")
        await self.receive()
        await self.swap()
        self.client.asked.clear()
        return self

    def ask(self, tokens: int = 4) -> Any:
        return self.leader.submit(GenerationRequest([1], 1, Sampling(max_new_tokens=tokens), key=0), asyncio.Event())


def in_front(test: Callable[[Front], Awaitable[None]], **options: bool) -> Front:
    async def run() -> Front:
        front = Front(**options)
        async with front.leader.running():
            await test(front)
        return front

    return asyncio.run(run())


def test_the_front_starts_vllm_when_it_is_told_to_and_puts_it_to_sleep() -> None:
    async def test(front: Front) -> None:
        assert front.service.about().state == "down"
        front.start.answered.clear()
        assert (await front.post("start"))["state"] == "down"
        slept = asyncio.ensure_future(front.post("sleep"))
        await front.post("start")  # repeated
        assert not slept.done()
        front.start.answered.set()
        about = await slept
        assert (about["state"], about["version"]) == ("asleep", None)
        assert front.start.begun == 1
        assert front.client.control == ["sleep"]

    in_front(test)


def test_a_front_that_has_not_started_vllm_has_nothing_to_leave_the_devices_with() -> None:
    async def test(front: Front) -> None:
        assert (await front.post("sleep"))["state"] == "down"

    assert in_front(test).client.control == []


def test_weights_are_loaded_while_they_arrive_and_the_probe_comes_first_when_the_cache_wakes() -> None:
    async def test(front: Front) -> None:
        await front.post("start")
        await front.post("sleep")
        front.client.held["load 7"] = asyncio.Event()
        about = await front.receive()
        assert about["state"] == "asleep"
        swapped = asyncio.ensure_future(front.swap())
        await front.receive()  # repeated, because its connection broke
        await asyncio.sleep(0)
        front.client.held["load 7"].set()
        about = await swapped
        assert (about["state"], about["version"]) == ("awake", 7)
        assert front.client.control == ["sleep", *LOADED, *USED]
        assert (await front.swap())["version"] == 7, "repeated"
        assert front.client.control == ["sleep", *LOADED, *USED]

    in_front(test)


def test_a_vllm_that_keeps_its_memory_only_pauses() -> None:
    async def test(front: Front) -> None:
        await front.awake()
        await front.post("sleep")
        await front.post("sleep")  # repeated
        await front.receive(8, {"number": 2})
        await front.swap(8)
        moved = ["pause", *(each.replace("7", "8") for each in LOADED[1:]), "forget prefixes", "score", "resume"]
        assert front.client.control == moved

    in_front(test, sleeps=False)


def test_unfinished_answers_stay_in_vllm_over_a_sleep_and_count_as_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LOOK_S", 0.0)

    async def test(front: Front) -> None:
        await front.awake()
        asked = front.ask()
        front.client.tokens.put_nowait(NewTokens(0, [3], [-1.0]))
        watch = asyncio.ensure_future(front.leader.watch())
        while not asked.answers[0].transcript.tokens:
            await asyncio.sleep(0)
        while "stats" not in front.client.asked:
            await asyncio.sleep(0)
        before, reached = front.leader.busy_s, front.client.reached
        await front.post("sleep")
        beats = front.beats
        while front.client.reached < reached + 2:
            await asyncio.sleep(0.001)
        assert front.beats > beats, "its workers react, although an answer waits"
        await front.receive(8, {"number": 2})
        await front.swap(8)
        assert front.leader.busy_s == before
        front.client.tokens.put_nowait(NewTokens(0, [9], [-2.0], [7, 8]))
        while not asked.answers[0].ended:
            await asyncio.sleep(0)
        assert asked.answers[0].transcript.versions == [7, 8]
        assert front.client.asked.count("generate") == 1
        assert front.service.about().rested_s > 0
        watch.cancel()

    in_front(test)


def test_requests_that_come_or_are_cancelled_while_it_sleeps() -> None:
    async def test(front: Front) -> None:
        await front.awake()
        asked = front.ask()
        await asyncio.sleep(0)
        await front.post("sleep")
        asked.close()
        while "end of generate" not in front.client.asked:
            await asyncio.sleep(0)
        late = {"id": "x", "prompt": [1], "samples": 1, "sampling": {"max_new_tokens": 4}, "key": 0}
        late |= {"ordinal": None, "grammar": "", "known": {}}
        await front.post("ask", driver=0, version=7, requests=[late], cancel=[])
        news = await front.service.handlers["/news"]({"driver": 0, "seen": 0, "wait_s": 0.0})
        assert [refusal[:2] for refusal in news["refused"]] == [("x", "other version")]
        assert front.client.asked.count("generate") == 1

    in_front(test)


@pytest.mark.parametrize(
    ("posts", "said"),
    [
        (["receive"], "its vLLM is down, and only receives weights while it is asleep"),
        (["swap"], "no weights were received"),
        (["start", "sleep", "swap"], "no weights were received"),
        (["start", "sleep", "receive", "swap", "receive again"], "its vLLM is awake, and only receives weights while"),
        (["start", "sleep", "receive", "sleep", "swap"], "its vLLM has not loaded version 7 since it fell asleep"),
        (["start", "sleep", "receive", "swap", "sleep", "swap"], "has not loaded version 7 since it fell asleep"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_post_in_the_wrong_state_is_refused_and_changes_nothing(posts: list[str], said: str) -> None:
    async def test(front: Front) -> None:
        requests: dict[str, Callable[[], Awaitable[Any]]] = {
            "receive": front.receive,
            "receive again": lambda: front.receive(8, {"number": 2}),
            "swap": front.swap,
        }
        for path in posts[:-1]:
            await requests.get(path, lambda path=path: front.post(path))()
        before = front.service.about()
        with pytest.raises(NotThere, match=said):
            await requests.get(posts[-1], lambda: front.post(posts[-1]))()
        assert front.service.about().state == before.state

    in_front(test)


def test_weights_that_do_not_come_leave_it_asleep_and_it_takes_the_next_ones() -> None:
    async def test(front: Front) -> None:
        await front.post("start")
        await front.post("sleep")
        front.client.fails["await 7"] = VllmRefused("no member answers")
        await front.receive()
        with pytest.raises(NotThere, match="version 7 did not arrive: no member answers"):
            await front.swap()
        del front.client.fails["await 7"]
        await front.receive(7, {"number": 2})
        assert (await front.swap())["version"] == 7
        assert front.client.control.count("wake weights") == 1
        await front.post("sleep")
        assert front.client.control[-1] == "sleep"

    in_front(test)


def test_it_sleeps_again_after_weights_that_did_not_come() -> None:
    async def test(front: Front) -> None:
        await front.post("start")
        await front.post("sleep")
        front.client.fails["receive 7"] = VllmRefused("no member answers")
        with pytest.raises(NotThere, match="does not receive version 7: no member answers"):
            await front.receive()
        await front.post("sleep")
        assert front.client.control == ["sleep", "wake weights", "receive 7", "sleep"]

    in_front(test)


def test_a_release_that_would_keep_its_weights_on_the_ranks_device_ends_instead() -> None:
    async def test(front: Front) -> None:
        await front.awake()
        await front.post("sleep")
        front.client.fails["receive 8"] = VllmRefused("no member answers")
        with pytest.raises(NotThere):
            await front.receive(8, {"number": 2})
        with pytest.raises(NotThere, match="vLLM does not sleep: this release keeps its weights"):
            await front.post("sleep")
        with pytest.raises(VllmGone, match="keeps its weights"):
            await front.leader.watch()

    in_front(test, sleeps_again=False)


@pytest.mark.parametrize(
    ("at", "error", "said"),
    [
        ("sleep", VllmRefused("memory usage increased"), "memory usage increased"),
        ("wake weights", VllmRefused("out of memory"), "out of memory"),
        ("load 7", VllmRefused("a bucket was overwritten"), "a bucket was overwritten"),
        ("finish 7", VllmGone("it does not answer"), "it does not answer"),
        ("wake cache", VllmClosed("vLLM has closed its socket"), "has closed its socket"),
        ("score", VllmGone("it does not answer"), "it does not answer"),
    ],
)
def test_a_failure_after_which_its_memory_is_unknown_ends_the_replica(at: str, error: Exception, said: str) -> None:
    async def test(front: Front) -> None:
        await front.post("start")
        front.client.fails[at] = error
        with pytest.raises(NotThere, match=said):
            await front.post("sleep")
            await front.receive()
            await front.swap()
        with pytest.raises(VllmGone, match=said):
            await front.leader.watch()

    in_front(test)


def test_a_version_whose_probe_fails_ends_the_replica_since_the_ranks_have_put_their_weights_away() -> None:
    async def test(front: Front) -> None:
        await front.post("start")
        await front.post("sleep")
        await front.receive()
        front.client.scores = [-3.0]
        with pytest.raises(NotThere, match="differ from the trainer's by 2"):
            await front.swap()
        with pytest.raises(ProbeFailed):
            await front.leader.watch()

    in_front(test)


@pytest.mark.parametrize("act", ["start update", "await 7", "load 7", "finish 7"])
def test_a_load_that_takes_too_long_in_any_part_ends_the_replica(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_turns, "CONTROL_S", 0.05)

    async def test(front: Front) -> None:
        await front.post("start")
        await front.post("sleep")
        front.client.held[act] = asyncio.Event()
        await front.receive()
        with pytest.raises(NotThere, match="vLLM has not loaded version 7 within"):
            await front.swap()
        with pytest.raises(VllmGone, match="has not loaded version 7"):
            await front.leader.watch()

    in_front(test)


@pytest.mark.parametrize("error", [ConfigurationError("vLLM refuses its options"), VllmGone("vLLM has ended")])
def test_a_start_that_fails_ends_the_front_with_its_reason(error: Exception) -> None:
    async def test(front: Front) -> None:
        front.start.error = error
        await front.post("start")
        with pytest.raises(NotThere, match=f"its vLLM has not started: {error}"):
            await front.post("sleep")
        with pytest.raises(type(error), match=str(error)):
            await front.leader.watch()

    in_front(test)


def test_a_death_asleep_ends_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LOOK_S", 0.0)

    async def test(front: Front) -> None:
        await front.post("start")
        await front.post("sleep")
        front.start.dead = VllmClosed("vLLM has ended (signal SIGKILL)")
        with pytest.raises(VllmGone, match="SIGKILL"):
            await front.leader.watch()

    in_front(test)


@pytest.mark.parametrize("posts", [[], ["start"]], ids=["down", "starting"])
def test_the_front_gives_signs_of_life_before_vllm_has_started(
    posts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LOOK_S", 0.0)

    async def test(front: Front) -> None:
        front.start.answered.clear()
        for path in posts:
            await front.post(path)
        watch = asyncio.ensure_future(front.leader.watch())
        while front.beats < 3:
            await asyncio.sleep(0.001)
        assert not watch.done()
        watch.cancel()

    front = in_front(test)
    front.vllm.end()
    assert front.start.ended == bool(posts), "leaving ends a vLLM that has not started yet"
