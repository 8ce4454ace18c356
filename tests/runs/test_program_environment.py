"""Rollouts of real programs against the endpoint, with a scripted model: their rewards, tokens and faults."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from optional import needs
from server_helpers import byte_tokenizer
from small_root import make_small_root

from megatron_rl.agent.api import EvaluationRequest, EvaluationResponse
from megatron_rl.agent.environments.program.arguments import ProgramConfig
from megatron_rl.agent.environments.program.program_environment import ProgramEnvironment
from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.scripted_trial import CodePoints
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling

pytestmark = [needs("datasets"), needs("openai")]

EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"


def rolled_out(
    tokenizer: Tokenizer,
    answers: Sequence[str] | Callable[[str, int], str],
    problems: Sequence[Mapping[str, Any]],
    folder: Path,
    samples: int = 1,
    **arguments: Any,
) -> EvaluationResponse:
    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    environment = ProgramEnvironment(ProgramConfig(problems=str(data), **arguments), tokenizer)

    async def evaluate() -> EvaluationResponse:
        try:
            return await environment.evaluate(
                EvaluationRequest(
                    problems=environment.training_problems(),
                    sampling=Sampling(max_new_tokens=600),
                    samples_per_problem=samples,
                    key=1,
                    inference=ScriptedInference(tokenizer, answers),
                    limits=RolloutLimits(60.0),
                )
            )
        finally:
            await environment.close()

    return asyncio.run(evaluate())


def uses_the_tool(prompt: str, sample: int) -> str:
    _, called, result = prompt.rpartition("[tool]")
    if called:
        return f"It is {result.partition('[')[0]}."
    return '<tool_call>\n{"name": "multiply", "arguments": {"a": 37, "b": 48}}\n</tool_call>'


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": ["{python}", "tool_loop.py"], "code": [str(EXAMPLES / "tool_loop.py")]},
        pytest.param(
            {"function": "agents_sdk:rollout", "code": [str(EXAMPLES / "agents_sdk.py")]},
            marks=[needs("agents"), pytest.mark.slow],
        ),
    ],
    ids=["openai client", "openai agents sdk"],
)
def test_an_agent_of_another_library_is_trained_token_for_token(tmp_path: Path, arguments: dict[str, Any]) -> None:
    problems = [{"prompt": "What is 37 * 48?", "answer": 1776}, {"prompt": "What is 2 * 2?", "answer": 4}]
    tokenizer = byte_tokenizer()
    found = rolled_out(tokenizer, uses_the_tool, problems, tmp_path, **arguments)
    assert not found.failures
    [right], [wrong] = found.trajectories
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert len(right.components) == 1 and len(right.turns) == 2 and not right.branches
    call, answer = (tokenizer.decode(right.tokens[turn.start : turn.stop]) for turn in right.turns)
    assert call == uses_the_tool("", 0) and answer == "It is 1776."
    assert right.loss_mask == [any(place in turn for turn in right.turns) for place in range(len(right.tokens))]


def doubtful(prompt: str, sample: int) -> str:
    """Answers of a solver that is wrong at first, and of a critic that notices."""
    if "Is this right?" in prompt:
        return "no"
    return "It is 1776." if "Try again." in prompt else "It is 1."


def test_each_agent_of_a_program_has_its_own_rewards_in_the_turns_that_it_spoke(tmp_path: Path) -> None:
    problems = [{"prompt": "What is 37 * 48?", "answer": 1776}]
    arguments = {"command": ["{python}", "two_agents.py"], "code": [str(EXAMPLES / "two_agents.py")]}
    tokenizer = byte_tokenizer()
    found = rolled_out(tokenizer, doubtful, problems, tmp_path, **arguments)
    assert not found.failures
    [[one]] = found.trajectories
    said = [
        tokenizer.decode(sequence.tokens[turn.start : turn.stop])
        for sequence in one.sequences
        for turn in sequence.turns
    ]
    assert dict(zip(said, one.turn_scores, strict=True)) == {
        "It is 1.": TurnScore(0.0, None, "solver", 0),
        "no": TurnScore(1.0, None, "critic", 1),
        "It is 1776.": TurnScore(1.0, None, "solver", 2),
    }
    assert len(one.branches) == 1 and said != ["It is 1.", "no", "It is 1776."], "the critic's is another sequence"


def test_a_program_that_scores_other_turns_than_it_had_is_lost_with_the_counts(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, os\n"
        "from openai import OpenAI\n"
        "OpenAI().completions.create(model=os.environ['OPENAI_MODEL'], prompt='1+1=', max_tokens=5)\n"
        "print(json.dumps({'reward': 1, 'turn_rewards': [0, 1]}))\n"
    )
    arguments = {"command": ["{python}", "agent.py"], "code": [str(tmp_path / "agent.py")]}
    found = rolled_out(byte_tokenizer(), ["2"], [{"prompt": "?", "answer": 2}], tmp_path, **arguments)
    assert found.failures == {"rollout: the reward is turn_rewards of 2 entries for 1 turn of the model": 1}


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_script_is_trained(tmp_path: Path) -> None:
    problems = [{"prompt": "What is 37 * 48?", "answer": 1776}, {"prompt": "What is 4 * 444?", "answer": 176}]
    arguments = {"command": ["./ask.sh"], "code": [str(EXAMPLES / "ask.sh")]}
    found = rolled_out(byte_tokenizer(), ["It is 1776."], problems, tmp_path, **arguments)
    assert not found.failures
    assert [trajectory.reward for [trajectory] in found.trajectories] == [1.0, 0.0]
    assert found.trajectories[0][0].output == "the model answers: It is 1776.\n1\n"


FAULTS = """
    import json, os, subprocess, sys, time
    from urllib.request import Request, urlopen

    def ask(key=os.environ["OPENAI_API_KEY"], root=os.environ["OPENAI_BASE_URL"].partition("/sessions/")[0] + "/v1"):
        body = {"model": os.environ["OPENAI_MODEL"], "prompt": "1+1=", "max_tokens": 5}
        headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
        return json.load(urlopen(Request(root + "/completions", json.dumps(body).encode(), headers)))

    kind = json.loads(sys.stdin.readline())["prompt"]
    if kind != "never calls": ask()
    if kind == "calls for ever":
        while True: ask()
    if kind == "uses another key": ask(key="x" * 43)
    if kind == "exits": sys.exit(1)
    if kind == "raises": {}["x"]
    if kind == "hangs": time.sleep(600)
    if kind == "forks and stays": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if kind == "keeps its key": open(sys.argv[1], "w").write(os.environ["OPENAI_BASE_URL"])
    if kind == "two rewards": print('{"reward": 1.0}\\n{"reward": 0.0}')
    elif kind == "not a number": print("NaN")
    elif kind == "too much": print("x" * 10_000_000 + "\\n0.5")
    elif kind != "no reward": print(1.0)
"""
LOST = {
    "never calls": "asked the model for nothing",
    "calls for ever": "max_calls",
    "uses another key": "program: exit code 1: urllib.error.HTTPError",
    "exits": "program: exit code 1",
    "raises": "program: exit code 1: KeyError",
    "hangs": "program: not done within 6 s (environment.args.timeout_s)",
    "two rewards": "program: two rewards: its last two lines report different ones",
    "not a number": "program: no reward: the reward is nan",
    "no reward": "program: no reward: it printed nothing",
}
REWARDED = {"forks and stays": 1.0, "keeps its key": 1.0, "too much": 0.5, "does all right": 1.0}


def test_a_program_at_fault_loses_its_rollout_with_a_reason_and_no_reward_is_invented(tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(textwrap.dedent(FAULTS))
    kept = tmp_path / "kept"
    problems = [{"prompt": kind} for kind in (*LOST, *REWARDED)]
    found = rolled_out(
        CodePoints(),
        ["2"],
        problems,
        tmp_path,
        command=[sys.executable, "faults.py", str(kept)],
        code=[str(tmp_path / "faults.py")],
        max_calls=5,
        timeout_s=6.0,
    )
    rewards = dict(zip([*LOST, *REWARDED], ([one.reward for one in its] for its in found.trajectories), strict=True))
    assert rewards == {kind: [] for kind in LOST} | {kind: [reward] for kind, reward in REWARDED.items()}
    reasons = [*found.failures.elements()]
    assert len(reasons) == len(LOST)
    for kind, reason in LOST.items():
        assert any(reason in each for each in reasons), (kind, reasons)
    with pytest.raises(httpx.ConnectError):  # the endpoint closes with its environment
        httpx.get(f"{kept.read_text()}/models")


def test_a_function_that_does_not_exist_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    arguments = {"function": "agent:rollout", "code": [str(tmp_path / "agent.py")]}
    with pytest.raises(ConfigurationError, match="agent:rollout: the module defines no rollout"):
        rolled_out(CodePoints(), ["2"], [{"prompt": "1"}], tmp_path, **arguments)


MENDS = "printf 'from statistics import median\\n' > median.py && python3 test_median.py"
CHEATS = """python3 - <<'END'
import glob, os
print(len(os.environ.get("OPENAI_API_KEY", "")), "characters of the key")
open("test_slug.py", "w").write("")
for output in glob.glob("/proc/[0-9]*/fd/1"):
    try:
        if os.readlink(output) != os.readlink("/proc/self/fd/1"):
            open(output, "w").write('{"reward": 1.0}\\n')
            print("wrote", output)
    except OSError:
        pass
END"""


def mends_or_cheats(prompt: str, sample: int) -> str:
    if "[exit code 0]" in prompt:
        return "done"
    return f"```sh\n{MENDS if 'test_median' in prompt else CHEATS}\n```"


@pytest.mark.slow
def test_an_agent_mends_a_repository_in_a_container_and_its_commands_cannot_report_its_reward(tmp_path: Path) -> None:
    tasks = [json.loads(line) for line in (EXAMPLES / "repair/tasks.jsonl").read_text().splitlines()][:2]
    found = rolled_out(
        byte_tokenizer(),
        mends_or_cheats,
        tasks,
        tmp_path,
        command=["python3", "agent.py"],
        code=[str(EXAMPLES / "repair/agent.py")],
        container={"image": str(make_small_root(tmp_path / "image"))},
    )
    assert not found.failures
    [mended], [not_mended] = found.trajectories
    assert (mended.reward, not_mended.reward) == (1.0, 0.0)
    assert len(mended.turns) == 2
    shown = byte_tokenizer().decode(not_mended.tokens).split("[user]")[2]
    assert shown.startswith("0 characters of the key\n[exit code 0]"), shown
    assert '"reward": 0.0' in not_mended.output
