"""The command of `vllm serve` comes from the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from core_helpers import tiny_run

from megatron_rl.generate.vllm.command import (
    Served,
    ServeSizes,
    VllmMember,
    replica_command,
    seed_of,
    serve_command,
    sizes_of,
    teacher_command,
    vllm_environment,
)
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.device_turns import sleeps
from megatron_rl.recipe.job import PLANS, Offload
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_options import owned
from megatron_rl.recipe.vllm_releases import RELEASES

SERVED = Served(Path("/t/model"), Path("/t"))
PARTITIONED = {
    "job": {"nodes": 2, "gpus_per_node": 1, "device": "cpu", "threads_per_rank": 1},
    "placement": {"mode": "partitioned", "inference": {"nodes": 1}},
    "resume": {"partial": "keep"},
    "model": {"head_dim": 32},
}


def run(inference: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    return tiny_run(**PARTITIONED | {"inference": {"engine": "vllm", **(inference or {})}} | sections)


def options(config: RunConfig) -> dict[str, str]:
    return options_in(replica_command(config, SERVED, "python", RELEASES[-1], 7))


def options_in(command: list[str]) -> dict[str, str]:
    assert command[:6] == ["python", "-P", "-m", "vllm.entrypoints.cli.main", "serve", "/t/model"]
    return dict(option.removeprefix("--").partition("=")[::2] for option in command[6:])


def test_the_model_is_served_on_the_socket_without_weights_and_tokenizer() -> None:
    found = options(run())
    assert found["uds"] == "/t/socket"
    assert found["load-format"] == "dummy"
    assert found["skip-tokenizer-init"] == ""
    assert found["weight-transfer-config"] == '{"backend": "mrl"}'
    assert found["generation-config"] == "vllm"
    assert (found["dtype"], found["seed"], found["max-model-len"]) == ("float32", "7", "48")


def test_options_of_the_user_are_passed_on() -> None:
    config = run({"vllm": {"args": {"gpu_memory_utilization": 0.5, "async-scheduling": False, "enable-dbo": True}}})
    found = options(config)
    assert found["gpu-memory-utilization"] == "0.5"
    assert "no-async-scheduling" in found
    assert found["enable-dbo"] == ""


def test_vllm_holds_back_no_tokens_if_it_does_not_report_their_versions() -> None:
    intervals = {
        row.reports_versions: options_in(replica_command(run(), SERVED, "python", row, 7))["stream-interval"]
        for row in RELEASES
    }
    assert intervals == {False: "1", True: "16"}


def test_what_the_run_sets_is_refused_from_the_user() -> None:
    """Options of the run come last, so another value would have no effect."""
    config = run({"page_tokens": 16, "cache_tokens": 960, "cuda_graphs": False, "share_prefixes": False})
    found = options_in(replica_command(config, SERVED, "python", RELEASES[-1], 7, Path("/traces")))
    assert [name for name in found if owned(name) is None] == []


def test_vllm_returns_choices_of_experts_if_they_are_replayed() -> None:
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "tied_embeddings": False}
    experts |= {"head_dim": 32, "qkv_bias": False, "qk_norm": True}
    found = {replay: options(run(model=experts | {"router_replay": replay})) for replay in ("off", "old", "rollout")}
    assert ["enable-return-routed-experts" in each for each in found.values()] == [False, False, True]


def test_vllm_profiles_its_workers_for_a_limited_number_of_steps() -> None:
    found = options_in(replica_command(run(), SERVED, "python", RELEASES[-1], 7, Path("/traces")))
    traces = json.loads(found["profiler-config"])
    assert (traces["torch_profiler_dir"], traces["max_iterations"]) == ("/traces", PLANS)
    assert traces["ignore_frontend"], "its trace has no limit"
    assert "profiler-config" not in options(run())


def beside_ranks(device: Literal["cpu", "cuda"], offload: Offload) -> dict[str, str]:
    """Options of a vLLM on the devices of training ranks."""
    config = run({"max_batch": 4, "page_tokens": 16})
    placement = config.placement.model_copy(update={"mode": "colocated", "offload": offload})
    job = config.job.model_copy(update={"device": device})
    return options(config.model_copy(update={"placement": placement, "job": job}))


@pytest.mark.parametrize("offload", ["none", "buffers", "optimizer"])
def test_a_vllm_on_the_gpus_of_ranks_has_a_cache_of_known_size_and_sleeps_if_memory_is_put_away(
    offload: Offload,
) -> None:
    found = beside_ranks("cuda", offload)
    assert ("enable-sleep-mode" in found) == sleeps(offload)
    assert found["kv-cache-memory-bytes"] == str(4 * 48 * 2 * 2 * 2 * 32 * 4)
    assert float(found["gpu-memory-utilization"]) < 0.1, "vLLM demands this share to be free when it starts"


def test_a_vllm_on_a_cpu_has_no_sleep_mode() -> None:
    assert not {"enable-sleep-mode", "gpu-memory-utilization"} & beside_ranks("cpu", "optimizer").keys()


@pytest.mark.parametrize(("temperature", "mode"), [(1.0, "raw_logprobs"), (0.7, "processed_logprobs")])
def test_log_probs_are_those_after_the_temperature(temperature: float, mode: str) -> None:
    assert options(run(sampling={"max_new_tokens": 3, "temperature": temperature}))["logprobs-mode"] == mode


def test_a_teacher_returns_as_many_likeliest_tokens_as_any_environment_reads() -> None:
    def likeliest(distill: dict[str, Any], *environments: dict[str, Any] | None) -> str | None:
        replicas = {"nodes": 1, "engine": "vllm"}
        listed = [
            {"name": "arithmetic", "id": f"e{number}"} | ({} if each is None else {"distill": each})
            for number, each in enumerate(environments)
        ]
        given = tiny_run().model_dump() | {"environment": None, "environments": listed}
        given |= {"job": PARTITIONED["job"], "distill": {"teacher": "/t", "replicas": replicas} | distill}
        sizes = ServeSizes(tiny_run().model, cpu=True, tp=1, longest=48, rows=4, prefill_tokens=16)
        found = teacher_command(RunConfig.model_validate(given), SERVED, sizes, "python", 7)
        return options_in(found).get("max-logprobs")

    few, many = ({"divergence": {"kind": "js", "top_k": count}} for count in (4, 40))
    assert likeliest({}, None) is None
    assert likeliest(few, None, many) == likeliest({}, many, few) == "40"
    assert likeliest(few, {"teacher": "/other", "divergence": None, "weight": 2.0}, None) == "4"
    assert likeliest({}, {"teacher": "/other", **many}, None) is None


def test_an_evaluation_starts_vllm_on_published_weights_with_the_options_of_its_run() -> None:
    sizes = ServeSizes(tiny_run().model, cpu=True, tp=1, longest=48, rows=4, prefill_tokens=16)
    given = VllmConfig(args={"async-scheduling": False, "seed-of-nothing": 3})
    found = options_in(serve_command("python", SERVED, sizes, given, {}, 7))
    assert not found.keys() & {"load-format", "weight-transfer-config"}
    assert found.items() >= {"no-async-scheduling": "", "seed-of-nothing": "3", "max-num-batched-tokens": "48"}.items()
    assert found["kv-cache-memory-bytes"] == str(sizes.cache_bytes)


def test_no_two_starts_of_replicas_share_a_seed() -> None:
    config = run()
    seeds = {seed_of(config, attempt, replica, start) for attempt in (1, 2) for replica in (0, 1) for start in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_cache_on_a_cpu_holds_max_batch_sequences_of_full_length() -> None:
    config = run({"max_batch": 4, "page_tokens": 16})  # 4 x 48 tokens, 2 layers, 2 heads of 32 floats, keys and values
    assert sizes_of(config).cache_bytes == 4 * 48 * 2 * 2 * 2 * 32 * 4


def test_the_world_of_the_front_is_hidden_from_vllm() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": "/code", "VLLM_CPU_OMP_THREADS_BIND": "0-3"}
    found = vllm_environment(environ, SERVED, cpu=True)
    assert found["VLLM_RPC_BASE_PATH"] == "/t"
    assert not {"RANK", "WORLD_SIZE"} & found.keys()
    assert found["PYTHONPATH"] == "/t/plugins:/code"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("of_ranks", "of_vllm"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:512, expandable_segments:True", "max_split_size_mb:512"),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
    ],
)
def test_the_allocator_of_vllm_has_no_expandable_segments(name: str, of_ranks: str, of_vllm: str | None) -> None:
    assert vllm_environment({name: of_ranks}, SERVED, cpu=False).get(name) == of_vllm


def test_a_vllm_over_nodes_is_told_its_node_and_where_the_first_one_is() -> None:
    layout = {"mode": "partitioned", "inference": {"nodes": 2, "tp": 2, "pp": 2}}
    config = run(placement=layout, job={"nodes": 4, "gpus_per_node": 2, "device": "cuda"})
    front, follower = (
        options_in(
            replica_command(
                config,
                SERVED,
                "python",
                RELEASES[-1],
                7,
                member=VllmMember(rank, 2, f"10.0.0.{rank}", "10.0.0.0", 5, 6),
            )
        )
        for rank in (0, 1)
    )
    assert front.items() >= {"tensor-parallel-size": "2", "pipeline-parallel-size": "2", "nnodes": "2"}.items()
    assert follower.items() >= {"master-addr": "10.0.0.0", "master-port": "5", "data-parallel-rpc-port": "6"}.items()
    assert (front["node-rank"], follower["node-rank"]) == ("0", "1")
    assert {"uds", "headless"} & front.keys() == {"uds"}
    assert {"uds", "headless"} & follower.keys() == {"headless"}
    assert {name: front[name] for name in front.keys() & follower.keys() - {"node-rank"}} == {
        name: follower[name] for name in front.keys() & follower.keys() - {"node-rank"}
    }, "all members of a world need the same settings"


def test_data_parallel_parts_share_one_server_and_their_experts() -> None:
    sizes = ServeSizes(tiny_run().model, cpu=False, tp=4, longest=48, rows=4, prefill_tokens=16, dp=2, ep=8)
    found = options_in(serve_command("python", SERVED, sizes, None, {}, 7))
    assert found.items() >= {"data-parallel-size": "2", "api-server-count": "1", "enable-expert-parallel": ""}.items()
