"""Worker of the environment `verifiers`: runs episodes in a Python that has verifiers.

    PYTHON -P verifiers_worker.py      a JSON object per line, on stdin and on stdout

    <- {"environments": {NAME: {"id": ..., "env": {...}, "tasks": 100}}, "prompts": true}
    -> {"number": 0, "version": "0.4.0", "prompts": {NAME: [...]}}   or {"error": ..., "version": ...}, and it ends
    <- {"number": 1, "environment": NAME, "task": 5, "base_url": ..., "api_key": ..., "model": ..., ...}
    <- {"cancel": 1}
    -> {"number": 1, "reward": 0.5, "components": {...}, "output": ...}   or {"number": 1, "lost": REASON}

Needs the standard library and verifiers, and nothing of mrl, so that any environment of Python can have it. The end of
stdin ends the worker.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HARNESS = "mrl_chat"
LONGEST_LINE = 2**26
END_S = 10.0
"""Seconds from the request to end until the process ends without cleaning up."""


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="verifiers | %(message)s", stream=sys.stderr)
    requests, replies = own_stdin(), Replies()
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        replies.write({"number": 0, "version": None, "error": "verifiers is not installed"})
        return
    request = json.loads(requests.readline())
    try:
        environments = {name: Loaded(**given) for name, given in request["environments"].items()}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment's package may raise anything
        replies.write({"number": 0, "version": installed, "error": f"{type(error).__name__}: {error}"})
        return
    prompts = {name: [prompt_of(task) for task in one.tasks] for name, one in environments.items()}
    replies.write({"number": 0, "version": installed, "prompts": prompts if request["prompts"] else {}})
    if not request["prompts"]:
        asyncio.run(Worker(environments, replies).serve(requests))


def own_stdin() -> io.FileIO:
    """Return the pipe that was stdin, which no child inherits, so that it is closed when this process ends. Unbuffered:
    asyncio reads what follows the first line."""
    requests = io.FileIO(os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return requests


class Replies:
    """The pipe that was stdout, which no child inherits either. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self._file = os.dup(1)
        os.dup2(2, 1)

    def write(self, reply: Mapping[str, Any]) -> None:
        left = json.dumps(reply).encode() + b"\n"
        while left:
            left = left[os.write(self._file, left) :]


class Loaded:
    def __init__(self, id: str, env: Mapping[str, Any], tasks: int | None) -> None:
        """env: verifiers' own configuration of the environment. tasks: how many to load; None: all."""
        register_harness()
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self.env = load_environment(resolve_env_config(with_defaults(id, env)))
        taskset = self.env.taskset if tasks is None else self.env.taskset.take(tasks)
        if not taskset.bounded:
            raise ValueError(f"the tasks of {id} are endless: set environment.args.tasks")
        self.tasks = list(taskset)


def register_harness() -> None:
    if HARNESS in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(HARNESS, Path(__file__).with_name("chat_harness.py"))
    assert spec is not None and spec.loader is not None  # the file is beside this one
    module = sys.modules[HARNESS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def with_defaults(id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an environment with our defaults: its agents run on this machine, where verifiers
    rents a sandbox, and talk to the model without a shell, where verifiers gives them bash. What the configuration or
    the environment's package says is kept."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    data = {**given, "taskset": {**given.get("taskset", {}), "id": id}}
    bundled = default_harness_id(id) == id
    for name, field in env_config_type(id, data.get("id", "")).model_fields.items():
        own = field.default
        if isinstance(own, AgentConfig):
            agent = dict(data.get(name) or {})
            if "runtime" not in own.model_fields_set:
                agent.setdefault("runtime", {"type": "subprocess"})
            if own.harness is None and not bundled:
                agent["harness"] = {"id": HARNESS, **(agent.get("harness") or {})}
            data[name] = agent
    return data


def prompt_of(task: Any) -> str:
    """Return the text that names a task in records: what the model reads first, or else the task's name."""
    system = task.data.system_prompt
    text = task.data.prompt_text or task.data.name or f"task {task.data.idx}"
    return f"{system}\n\n{text}" if system else str(text)


class Worker:
    def __init__(self, environments: Mapping[str, Loaded], replies: Replies) -> None:
        self._environments = environments
        self._replies = replies
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, requests: io.FileIO) -> None:
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=LONGEST_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), requests)
        loop.add_signal_handler(signal.SIGTERM, lines.feed_eof)
        async with AsyncExitStack() as stack:
            for one in self._environments.values():
                await stack.enter_async_context(one.env.serving())
                # Each rollout then opens its own interception server. A shared one would keep a client, with its
                # connections, for every key that it has seen, until the end of the run.
                one.env._interception = None
            while line := await lines.readline():
                self._handle(json.loads(line))
            end_within(END_S)
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _handle(self, request: Mapping[str, Any]) -> None:
        if "cancel" in request:
            if task := self._running.get(request["cancel"]):
                task.cancel()
            return
        number = request["number"]
        task = self._running[number] = asyncio.create_task(self._answer(request))
        task.add_done_callback(lambda _: self._running.pop(number))

    async def _answer(self, request: Mapping[str, Any]) -> None:
        try:
            found = await self._run(request)
        except asyncio.CancelledError:
            self._replies.write({"number": request["number"], "lost": "cancelled"})
            raise
        except Exception as error:  # noqa: BLE001 - an environment may raise anything, which loses this rollout alone
            found = {"lost": f"{type(error).__name__}: {error}"}
        self._replies.write({"number": request["number"], **found})

    async def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from verifiers.v1 import ModelContext

        one = self._environments[request["environment"]]
        # verifiers takes keys from variables. API_KEY in the name keeps this one from the programs of other rollouts.
        variable = f"MRL_API_KEY_{request['number']}"
        os.environ[variable] = request["api_key"]
        bypass_proxies(urlsplit(request["base_url"]).hostname or "")
        try:
            client = client_config(request, variable)
            context = ModelContext(model=request["model"], client=client, sampling=sampling_of(request))
            (slot,) = one.env.slots(one.tasks[request["task"]])
            return outcome(await one.env.run_slot(slot, context), client)
        finally:
            os.environ.pop(variable, None)


def client_config(request: Mapping[str, Any], variable: str) -> Any:
    """Return the client of verifiers that asks the policy endpoint: its train client, which renders the conversation
    to token ids, if `renderer` names a renderer of the model, and otherwise its client for chat completions, so that
    the endpoint applies the chat template."""
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig

    if request["renderer"] is None:
        return EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
    return TrainClientConfig(
        base_url=request["base_url"],
        api_key_var=variable,
        renderer={"name": request["renderer"]},
        renderer_model_name=request["tokenizer"],
    )


def sampling_of(request: Mapping[str, Any]) -> Any:
    from verifiers.v1.types import SamplingConfig

    variables = request["chat_template"]
    return SamplingConfig(**{"chat_template_kwargs": variables} if variables else {})


def bypass_proxies(host: str) -> None:
    """Keep requests to the policy endpoint from a proxy, which does not know the machines of a job."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if host not in known.split(","):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{known},{host}".strip(",")


def outcome(episode: Any, client: Any) -> dict[str, Any]:
    """Return the reward of an episode with its components, or why it has none. The reward is the mean over the traces
    that train the policy; most episodes have one."""
    traces: Sequence[Any] = episode.traces
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors:  # also of an attempt that verifiers repeated: the endpoint has its tokens too
        return {"lost": f"{errors[0].type}: {errors[0].message}"}
    trained = [trace for trace in traces if trace.agent.trainable]
    if not trained:
        return {"lost": "the episode trains no agent"}
    for trace in traces:
        if not trace.agent.trainable and trace.calls and trace.agent.config.client == client:
            name = trace.agent.name
            return {"lost": f"agent {name} is not trained but asks the policy: give it a client (env.{name}.client)"}
    for trace in trained:
        if not trace.rewards or None in trace.rewards.values():
            return {"lost": f"the task has no reward ({trace.stop_condition})"}
    found: dict[str, list[float]] = {}
    several = len({trace.agent.name for trace in trained}) > 1
    for trace in trained:
        numbers = {name: reward.score for name, reward in trace.rewards.items()}
        numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in numbers.items():
            found.setdefault(component(f"{trace.agent.name}.{name}" if several else name), []).append(value)
    return {
        "reward": mean(trace.reward for trace in trained),
        "components": {name: mean(values) for name, values in found.items() if name != "reward"},
        "output": "\n".join(
            f"{trace.agent.name}: {trace.num_turns} turns, ended by {trace.stop_condition}" for trace in traces
        ),
    }


def component(name: str) -> str:
    """Return the name of a reward or metric with _ for each character that the records do not allow."""
    return "".join(one if one.isascii() and (one.isalnum() or one in "_.-") else "_" for one in name)


def mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)


def end_within(seconds: float) -> None:
    """End this process after `seconds`, whatever an environment's code does then."""
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
