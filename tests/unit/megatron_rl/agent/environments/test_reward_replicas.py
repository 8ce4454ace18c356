"""A reward model on replicas of the run: whom the environment asks, and what ends the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.environments.judged.judged_arguments import JudgedConfig, RewardModelConfig
from megatron_rl.agent.environments.judged.judged_environment import JudgedEnvironment
from megatron_rl.agent.environments.judged.judges import RewardModel
from megatron_rl.agent.scoring import NoScorer, NotJudged, RolloutLimits
from megatron_rl.agent.scripted_trial import CodePoints
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP, REPLICA_RUNNING
from megatron_rl.contract.paths import REWARD, RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.engine.engine_thread import EngineGone
from megatron_rl.generate.engine.openai import Endpoint
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.generate.replica.scoring_service import ClassifyingService
from megatron_rl.generate.replicas.fixed_replicas import FixedModelLost, running_replicas
from megatron_rl.generate.replicas.wire import PROTOCOL, digest_of
from megatron_rl.recipe.inference import Sampling

LIMIT_S = 60.0


class Replica:
    """A replica that scores a text by its length."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.status = 200

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/classify ")
        asked = json.loads(await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0])))
        self.texts.append(asked["input"])
        body = json.dumps({"data": [{"probs": [float(len(asked["input"]))]}]}).encode()
        writer.write(b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (self.status, len(body)))
        writer.write(body)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def listening(replica: Replica) -> AsyncIterator[Endpoint]:
    async with await asyncio.start_server(replica.answer, "127.0.0.1", 0) as server:
        yield Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", REWARD)


def asking(running: Any) -> RewardModel:
    model = RewardModel(RewardModelConfig(text="{response}"))
    assert model.replicas is not None
    model.replicas.use(running, LIMIT_S)
    return model


def test_answers_are_shared_by_the_replicas_that_run_and_a_lost_one_is_replaced() -> None:
    old, new, other = Replica(), Replica(), Replica()
    now: list[Endpoint] = []

    async def run() -> None:
        async with listening(other) as of_other:
            async with listening(old) as of_old:
                now[:] = [of_old, of_other]
                model = asking(lambda: [*now])
                words = ["a" * length for length in range(1, 20)]
                scores = await asyncio.gather(*(model.score("", word, "") for word in words))
                assert scores == [*range(1, 20)]
                assert old.texts and other.texts
            async with listening(new) as of_new:  # another start of the first replica
                now[:] = [of_new]
                while not new.texts:
                    word = "b" * (1 + len(other.texts))
                    assert await model.score("", word, "") == len(word)
            await model.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_an_answer_that_the_reward_model_refuses_is_lost_and_so_is_one_outside_of_a_run() -> None:
    replica = Replica()
    replica.status = 400

    async def run() -> None:
        with pytest.raises(NotJudged, match=r"the replicas of reward\.replicas are there only while their run trains"):
            await RewardModel(RewardModelConfig()).score("", "a", "")
        async with listening(replica) as endpoint:
            model = asking(lambda: [endpoint])
            with pytest.raises(NotJudged, match=r"the reward model did not answer: .* HTTP 400"):
                await model.score("", "a", "")
            await model.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_group_whose_reward_model_is_given_up_ends_the_run() -> None:
    """Its answers would all be lost, step after step."""

    def running() -> Sequence[Endpoint]:
        raise FixedModelLost("all replicas of the reward model are given up: boom")

    async def group() -> TrajectoryGroup:
        environment = JudgedEnvironment(JudgedConfig(reward_model=RewardModelConfig()), CodePoints())
        environment.use_reward_model(running, LIMIT_S)
        inference = ScriptedInference(CodePoints(), ["2", "3"])
        problem = Problem("1+1", {"question": "1+1", "answer": "2"})
        asked = GroupRolloutRequest(0, problem, 2, Sampling(max_new_tokens=9), 1, inference, RolloutLimits(LIMIT_S, 1))
        try:
            return await environment.group_rollout(asked)
        finally:
            await environment.close()

    with pytest.raises(NoScorer, match="boom"):
        asyncio.run(asyncio.wait_for(group(), LIMIT_S))


def test_replicas_are_found_by_their_addresses_and_missed_once_all_are_given_up(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.resolved.write_text("{}")
    running = running_replicas(run, run.attempt(1), REWARD, 9.0)
    assert running() == []
    for number, digest in enumerate((digest_of(run.resolved), "of another recipe")):
        files = run.attempt(1).replica(number, REWARD)
        files.folder.mkdir(parents=True)
        write(files.listener, ReplicaAddress(number, 0, f"node{number}", 80, 1, digest, PROTOCOL, 0.0))
        write(files.state, ReplicaState(number, REPLICA_RUNNING, 1, 0.0))
    assert running() == [Endpoint("http://node0:80/v1", REWARD, token_file=run.token, timeout_s=9.0)]
    for number in range(2):
        write(run.attempt(1).replica(number, REWARD).state, ReplicaState(number, REPLICA_GIVEN_UP, 6, 0.0, why="boom"))
    with pytest.raises(FixedModelLost, match="all replicas of the reward model are given up: boom"):
        running()


class Classifier:
    """A vLLM whose answers are given."""

    def __init__(self, found: dict[str, Any] | Exception) -> None:
        self.found = found

    def running(self) -> Any:
        raise NotImplementedError

    async def watch(self) -> None:
        raise NotImplementedError

    async def classify(self, body: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found | {"asked": body}


@pytest.mark.parametrize(
    ("found", "body", "status"),
    [
        ({"data": []}, {"input": "a"}, 200),
        (ValueError("too long"), {"input": "a"}, 400),
        (EngineGone("no vLLM"), {"input": "a"}, 503),
        ({"data": []}, [1], 400),
    ],
)
def test_a_replica_passes_requests_on_and_says_who_is_to_blame(
    found: dict[str, Any] | Exception, body: Any, status: int
) -> None:
    replica = RunDir("/nonexistent").attempt(1).replica(0, REWARD)
    service = ClassifyingService(Classifier(found), replica, ReplicaAddress(0, 0, "", 0, 1, "", 1, 0.0), "f" * 32)

    async def asked(token: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), headers=headers) as http:
            return await http.post("http://replica/v1/classify", json=body)

    answer = asyncio.run(asked("f" * 32))
    assert answer.status_code == status
    assert status != 200 or answer.json() == {"data": [], "asked": {"input": "a"}}
    assert asyncio.run(asked("0" * 32)).status_code == 401
