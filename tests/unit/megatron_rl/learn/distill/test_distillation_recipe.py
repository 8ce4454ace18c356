"""Recipes with a teacher: what contradicts one, and what its files say against it at submission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from core_helpers import tiny_run
from pydantic import ValidationError
from supervised_helpers import supervised_run

from launcher.errors import BadInput
from launcher.plan.parameters import weights
from launcher.plan.summary import make_plan, plan_json
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.teacher_files import read_vocabulary, teacher_files, vocabulary_difference

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 61,
    "hidden_act": "silu",
}
ALPHABET = "0123456789+-="


def published(folder: Path, vocabulary: dict[str, int], **shape: Any) -> Path:
    """Files of a model that say what the launcher reads of them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    added = [{"id": len(vocabulary), "content": "<end>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return folder


def numbered(text: str) -> dict[str, int]:
    return {character: number for number, character in enumerate(text)}


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"grpo": {"dynamic_sampling": {"enabled": True}}}, "distill is given, and grpo.dynamic_sampling is enabled"),
        (
            {"distill": {"server": {"urls": "http://a/v1", "model": "m"}}, "sampling": {"temperature": 0.7}},
            "distill.server is given, and sampling.temperature is 0.7",
        ),
        ({"distill": {"server": {"urls": "http://a/v1", "model": "m", "kind": "sglang"}}}, "SGLang has another API"),
        (
            {"distill": {"replicas": {"nodes": 1}}, "job": {"nodes": "2-3"}},
            "job.nodes 2-3 is a range, and distill.replicas needs one number",
        ),
        (
            {"distill": {"replicas": {"nodes": 1}, "server": {"urls": "http://a/v1", "model": "m"}}},
            "replicas and server are both given",
        ),
        ({"distill": {"replicas": {"nodes": 1, "vllm": {}}}}, "vllm is given, and engine is native"),
        (
            {"distill": {"replicas": {"nodes": 1}, "divergence": {"kind": "js"}}},
            "divergence and replicas are both given, and only training ranks compute whole distributions",
        ),
        ({"distill": {"divergence": {"kind": "forward", "beta": 0.2}}}, "beta is given, and kind is forward"),
        (
            {"distill": {"teacher": "policy", "replicas": {"nodes": 1}}},
            "teacher is policy, which the training ranks hold, and replicas is given",
        ),
        (
            {"distill": {"replicas": {"nodes": 1}, "divergence": {"kind": "js", "top_k": 21}}},
            "divergence.top_k is 21, and replicas.engine native returns at most 20",
        ),
        (
            {
                "distill": {
                    "server": {"urls": "http://a/v1", "model": "m"},
                    "divergence": {"kind": "js", "top_k": 4, "temperature": 0.5},
                }
            },
            "distill.server is given, and distill.divergence.temperature is 0.5",
        ),
    ],
)
def test_contradictions_are_refused_with_their_keys(sections: dict[str, Any], error: str) -> None:
    given = {"distill": {"teacher": "/t"} | sections.pop("distill", {})} | sections
    with pytest.raises(ValidationError, match=error):
        tiny_run(**given)


def in_environments(distill: dict[str, Any] | None, *keys: dict[str, Any] | None) -> RunConfig:
    """A recipe with an environment for each of these `distill` sections."""
    environments = [
        {"name": "arithmetic", "id": f"e{number}"} | ({} if each is None else {"distill": each})
        for number, each in enumerate(keys)
    ]
    values = tiny_run().model_dump() | {"environment": None, "environments": environments, "distill": distill}
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("distill", "keys", "error"),
    [
        (None, [{"weight": 2.0}], r"environments.0.distill: teacher is missing, and there is no `distill`"),
        (None, [{"weight": 0.0, "teacher": "/t"}], r"weight is 0 and teacher is given"),
        ({"teacher": "/t"}, [{"weight": None}], r"weight is null: leave it out"),
        ({"teacher": "/t"}, [{"weight": 0.0}], r"distill is given, and distill.weight is 0 in every environment"),
        (
            {"teacher": "/t", "replicas": {"nodes": 1}},
            [{"teacher": "/u"}],
            "distill.replicas is given, and every environment has a teacher elsewhere",
        ),
        (
            {"teacher": "/t"},
            [{"teacher": "policy", "server": {"urls": "http://a/v1", "model": "m"}}],
            "environments.0.distill: teacher is policy, which the training ranks hold, and server is given",
        ),
    ],
)
def test_contradictions_of_an_environments_teacher_are_refused(
    distill: dict[str, Any] | None, keys: list[dict[str, Any]], error: str
) -> None:
    with pytest.raises(ValidationError, match=error):
        in_environments(distill, *keys)


def test_an_environment_takes_the_keys_that_it_does_not_give_from_distill() -> None:
    served = {"urls": "http://a/v1", "model": "m"}
    distill = {"teacher": "/t", "server": served, "weight": 0.5, "reward_weight": 0.0}
    config = in_environments(distill, None, {"weight": 2.0}, {"teacher": "/u"}, {"weight": 0.0})
    first, heavier, own, nobody = config.teachings.by_id.values()
    assert first == config.distill and nobody is None
    assert heavier is not None and (heavier.teacher, heavier.weight, heavier.server) == ("/t", 2.0, first.server)  # type: ignore[union-attr]
    assert own is not None and (own.teacher, own.server, own.weight, own.reward_weight) == ("/u", None, 0.5, 0.0)
    assert [each.teacher for each in config.teachings.held] == ["/u"]
    assert RunConfig.model_validate(config.model_dump()) == config


def test_a_prompt_for_a_teacher_needs_one_and_the_policy_as_its_teacher_needs_such_a_prompt(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1+1", "answer": "2"}\n')
    math = ["environment.name=math", f"environment.args={{train: {rows}, prompt: '{{question}}'}}"]
    hint = "environment.args.teacher_prompt='{answer} {question}'"
    with pytest.raises(BadInput, match=r"environment.args.teacher_prompt is given, and no teacher reads it"):
        load_recipe("demo", [*math, hint])
    with pytest.raises(BadInput, match=r"environment.args.teacher_prompt is missing, and distill.teacher is policy"):
        load_recipe("demo", [*math, "distill.teacher=policy"])
    (tmp_path / "policy").mkdir()  # the name means no folder
    assert load_recipe("demo", [*math, hint, "distill.teacher=policy"]).config.distill.teacher == "policy"  # type: ignore[union-attr]


def test_the_plan_counts_each_teacher_on_the_ranks_once(tmp_path: Path) -> None:
    one, other = (
        published(tmp_path / name, numbered(ALPHABET), num_hidden_layers=n) for name, n in (("a", 2), ("b", 4))
    )
    environments = [
        {"name": "arithmetic", "id": "a"},
        {"name": "arithmetic", "id": "b", "distill": {"teacher": str(other)}},
        {"name": "arithmetic", "id": "c", "distill": {"teacher": str(other), "weight": 2.0}},
    ]
    given = [f"distill.teacher={one}", "environment=null", f"environments={json.dumps(environments)}"]
    recipe = load_recipe("demo", given)
    parameters = [teacher_files(folder).parameters for folder in (one, other)]
    assert [each.parameters for each in recipe.config.teachings.held] == parameters
    plan = plan_json(recipe.config, make_plan(recipe, None), None)
    found = [term["bytes"] for term in plan["memory"][0]["terms"] if term["name"] == "teacher"]
    assert found == [4 * each for each in parameters]


def test_a_teacher_of_rows_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"distill is given, and training.objective is supervised"):
        supervised_run(data={"path": "/x"}, distill={"teacher": "/t"})


def asked(teacher: Path, *more: str) -> None:
    load_recipe("demo", [f"distill.teacher={teacher}", *more])


def test_a_teacher_that_fits_is_accepted_also_with_further_tokens(tmp_path: Path) -> None:
    asked(published(tmp_path / "teacher", numbered(ALPHABET + "*")))


@pytest.mark.parametrize("experts", [{}, {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}])
def test_the_plan_counts_the_weights_of_a_teacher_on_the_ranks(tmp_path: Path, experts: dict[str, Any]) -> None:
    more = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True} if experts else {}
    folder = published(tmp_path / "teacher", numbered(ALPHABET), **experts, **more)
    recipe = load_recipe("demo", [f"distill.teacher={folder}"])
    exact = weights(teacher_files(folder).model, SHAPE["vocab_size"]).all
    assert recipe.config.distill is not None and recipe.config.distill.parameters is not None
    assert recipe.config.distill.parameters == pytest.approx(exact, rel=0.06)  # norms and biases of a tiny model
    plan = plan_json(recipe.config, make_plan(recipe, None), None)
    terms = {term["name"]: term["bytes"] for term in plan["memory"][0]["terms"]}
    assert terms["teacher"] == 4 * recipe.config.distill.parameters
    served = load_recipe("demo", [f"distill.teacher={folder}", "distill.server={urls: http://a/v1, model: m}"])
    assert "teacher" not in str(plan_json(served.config, make_plan(served, None), None)["memory"])


@pytest.mark.parametrize(
    ("vocabulary", "shape", "overrides", "error"),
    [
        ("0123456789-+=", {}, [], r"2 of the 13 tokens of the policy are others .* such as '\+', number 10, which is"),
        (ALPHABET, {"max_position_embeddings": 16}, [], "knows 16 positions, fewer than training.sequence_length 32"),
        (ALPHABET, {}, ["placement.training.pp=2"], "pp 2 does not divide model.num_layers 3"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_at_submission(
    tmp_path: Path, vocabulary: str, shape: dict[str, Any], overrides: list[str], error: str
) -> None:
    folder = published(tmp_path / "teacher", numbered(vocabulary), **shape)
    with pytest.raises(BadInput, match=rf"override 'distill.teacher=.*distill.teacher .*{error}"):
        asked(folder, *overrides)


def test_more_likeliest_tokens_than_the_policy_has_are_refused_at_submission(tmp_path: Path) -> None:
    folder = published(tmp_path / "teacher", numbered(ALPHABET))
    with pytest.raises(BadInput, match=r"distill.divergence.top_k is 13, and the policy has 13 tokens: leave it out"):
        asked(folder, "distill.divergence={kind: js, top_k: 13}")
    asked(folder, "distill.divergence={kind: js, top_k: 12}")


ON_REPLICAS = ("job.nodes=2", "distill.replicas.nodes=1")


def test_the_plan_counts_the_weights_of_a_teacher_on_its_replicas(tmp_path: Path) -> None:
    folder = published(tmp_path / "teacher", numbered(ALPHABET))
    recipe = load_recipe("demo", [f"distill.teacher={folder}", *ON_REPLICAS, "distill.replicas.tp=2"])
    assert recipe.config.distill is not None and recipe.config.distill.parameters is not None
    plan = plan_json(recipe.config, make_plan(recipe, None), None)
    assert plan["teacher"] == {"nodes": 1, "ranks": 2, "replicas": 1, "tp": 2}
    training, teacher = plan["memory"]
    assert "teacher" not in str(training)
    weights_of_one = 4 * recipe.config.distill.parameters // 2
    assert (teacher["role"], teacher["terms"][0]["bytes"]) == ("teacher", weights_of_one)


@pytest.mark.parametrize(
    ("shape", "overrides", "error"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            ["distill.replicas.tp=2"],
            "tp 2 does not divide",
        ),
        ({}, ["distill.replicas.engine=vllm"], "has attention heads of size 8, and vLLM on a CPU supports"),
    ],
)
def test_a_teacher_that_does_not_fit_its_replicas_is_refused_at_submission(
    tmp_path: Path, shape: dict[str, Any], overrides: list[str], error: str
) -> None:
    folder = published(tmp_path / "teacher", numbered(ALPHABET), **shape)
    with pytest.raises(BadInput, match=error):
        asked(folder, *ON_REPLICAS, *overrides)


def test_a_teacher_on_servers_need_not_fit_the_layout(tmp_path: Path) -> None:
    folder = published(tmp_path / "teacher", numbered(ALPHABET))
    asked(folder, "placement.training.pp=2", "distill.server.urls=http://a/v1", "distill.server.model=teacher")


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds neither Hugging Face weights \(config.json\) nor a checkpoint of a run"):
        asked(tmp_path)


def test_vocabularies_of_all_kinds_of_tokenizers_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}))
    assert read_vocabulary(tmp_path) == {"a": 0, "b": 1}  # Unigram
    assert read_vocabulary(tmp_path / "missing") is None
    assert vocabulary_difference({"a": 0}, {"a": 0, "b": 1}) is None
