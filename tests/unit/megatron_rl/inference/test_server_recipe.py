"""Recipes whose answers come from a server with the run's weights."""

from __future__ import annotations

import pytest

from launcher.errors import BadInput
from launcher.plan.gpu_memory import rank_memories
from launcher.plan.summary import make_plan
from launcher.recipe.load import load_recipe
from megatron_rl.inference.config import ServerConfig
from megatron_rl.inference.served import endpoints_of

VLLM = "inference.server={kind: vllm, urls: 'http://gpu17:8000/v1', folder: /dev/shm/policy}"


def recipe(*overrides: str) -> list[str]:
    return ["inference.engine=server", VLLM, *overrides]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["inference.engine=server"], "inference.server is missing: each needs the other"),
        ([VLLM], "inference.engine is native and inference.server is given"),
        (recipe("placement.mode=partitioned", "placement.inference.nodes=1"), "placement.mode is partitioned"),
        (recipe("placement.inference.tp=2"), "placement.inference.tp is given"),
        (recipe("model.init=from-scratch"), "model.init is from-scratch"),
        (recipe("resume.partial=regenerate"), "resume.partial is regenerate"),
        (recipe("sampling.temperature=0.7"), "sampling.temperature 0.7: vLLM's raw log-probs"),
        (recipe("inference.server.processed_logprobs=true", "sampling.top_k=5"), "sampling.top_k: vLLM's processed"),
        (recipe("inference.server.urls=gpu17:8000"), "inference.server.urls.0: expected http://HOST:PORT/v1"),
        (recipe("inference.server.urls=['http://a/v1', 'http://a/v1']"), "urls names a server twice"),
        (recipe("inference.server.token_file=a", "inference.server.token_variable=B"), "both given"),
        (recipe("inference.server.kind=mrl"), "mrl serve refuses requests without its token"),
        (recipe("inference.server.kind=sglang", "sampling.min_new_tokens=2"), "sampling.min_new_tokens is given"),
        (recipe("inference.server.kind=tgi"), "inference.server.kind"),
    ],
)
def test_unsupported_settings_are_refused_with_their_key(overrides: list[str], why: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_recipe("qwen2.5-32b-dapo", overrides)
    assert why in str(refused.value)


def test_ranks_that_only_train_need_no_cache() -> None:
    config = load_recipe("qwen2.5-32b-dapo", recipe()).config
    (memory,) = rank_memories(config, make_plan(load_recipe("qwen2.5-32b-dapo", recipe()), None).sizes, 152064)
    assert {phase.name for phase in memory.phases} == {"build", "train", "update"}


@pytest.mark.parametrize("urls", ["http://a:1/v1", ["http://a:1/v1", "http://b:1/v1"]])
def test_there_may_be_one_server_or_several(urls: str | list[str]) -> None:
    section = {"kind": "vllm", "urls": urls, "folder": "/dev/shm/policy", "token_variable": "KEY"}
    endpoints = endpoints_of(ServerConfig.model_validate(section))
    assert [each.url for each in endpoints] == ([urls] if isinstance(urls, str) else urls)
    assert {(each.timeout_s, each.token_variable) for each in endpoints} == {(3600, "KEY")}
