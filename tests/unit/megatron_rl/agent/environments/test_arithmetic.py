"""The arithmetic environment: reasoning-gym's sums without repeats, with a permanent split and strict scoring."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.agent.environments.arithmetic import ArithmeticConfig, ArithmeticEnvironment, _chain_sum
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

if importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed", allow_module_level=True)
CHAIN_SUM = _chain_sum()
VERIFIER = CHAIN_SUM.ChainSumDataset(CHAIN_SUM.ChainSumConfig(seed=0, size=1))


def environment(alphabet: str = "0123456789+-=", **args: Any) -> ArithmeticEnvironment:
    tokenizer = build_tokenizer(TokenizerConfig(type="characters", alphabet=alphabet))
    return ArithmeticEnvironment(ArithmeticConfig(**args), tokenizer)


DEFAULT = environment()


def prompts(of: ArithmeticEnvironment, split: str) -> list[str]:
    return [problem.prompt for problem in of.evaluation_problems()[split]]


def test_each_of_two_hundred_sums_appears_once_and_a_fifth_is_neither_trained_on_nor_demonstrated() -> None:
    held_out, trained = prompts(DEFAULT, "held_out"), [problem.prompt for problem in DEFAULT.training_problems()]
    assert (len(held_out), len(trained)) == (40, 160) and {*prompts(DEFAULT, "trained")} == {*trained}
    assert {*held_out, *trained} == {f"{a}{sign}{b}=" for a in range(10) for b in range(10) for sign in "+-"}
    assert [prompt for prompt, _ in DEFAULT.demonstrations()] == trained


def test_demonstrations_are_right() -> None:
    for prompt, answer in DEFAULT.demonstrations():
        assert str(eval(prompt.removesuffix("="))) == answer


def test_split_is_the_same_on_every_machine_and_follows_the_seed() -> None:
    assert prompts(DEFAULT, "held_out")[:5] == ["6-7=", "5+2=", "5-4=", "8-3=", "5+9="]
    assert set(prompts(environment(seed=1), "held_out")) != set(prompts(DEFAULT, "held_out"))
    assert prompts(environment(draws=6000), "held_out") == prompts(DEFAULT, "held_out")


def test_nothing_held_out_and_short_evaluation() -> None:
    sets = environment(held_out=0.0, evaluation_problems=7).evaluation_problems()
    assert {name: len(problems) for name, problems in sets.items()} == {"trained": 7}


def test_complete_right_answer_earns_one_and_cut_off_answer_nothing() -> None:
    for problem in DEFAULT.training_problems():
        assert DEFAULT.get_reward(problem.golden["answer"], problem.golden, "stop") == 1.0
        assert DEFAULT.get_reward(problem.golden["answer"], problem.golden, "length") == 0.0


@given(st.text(alphabet="0123456789+-=. ", max_size=4), st.integers(-9, 18))
def test_reward_is_the_librarys_verifier_on_canonical_integers(response: str, right: int) -> None:
    entry = {"answer": str(right)}
    verified = VERIFIER.score_answer(response, entry) == 1.0
    try:
        canonical = response == str(int(response))
    except ValueError:
        canonical = False
    assert DEFAULT.get_reward(response, entry, "stop") == float(verified and canonical)


def test_template_renders_the_tasks_metadata() -> None:
    rendered = environment(alphabet="0123456789+-=:", template="{num_terms}:{expression}=", max_terms=3)
    by_terms = {prompt.split(":")[0] for prompt in prompts(rendered, "held_out")}
    assert by_terms == {"2", "3"}
    assert not any(" " in prompt for prompt in prompts(rendered, "held_out"))


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"template": "{expresion}="}, r"unknown field \{expresion\}; available are expression"),
        ({"template": "="}, "must contain"),
        ({"template": "{expression"}, "template"),
        ({"min_terms": 3, "max_terms": 2}, "min_terms 3 is larger than max_terms 2"),
        ({"min_digits": 3}, "min_digits 3 is larger than max_digits 1"),
        ({"held_out": 1.0}, "held_out"),
        ({"digits": 2}, "digits"),
    ],
)
def test_bad_arguments_are_rejected(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ArithmeticConfig(**args)


def test_alphabet_without_a_needed_character_is_rejected_at_start() -> None:
    with pytest.raises(ValueError, match="no token for the character '-'"):
        environment(alphabet="0123456789+=")


def test_tasks_are_imported_without_their_package_which_can_still_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with all tasks imports matplotlib, among others, which takes most of a second of every start of a
    rank."""
    packages = ("reasoning_gym", "reasoning_gym.arithmetic")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("reasoning_gym", "matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    alone = _chain_sum()
    assert not {"matplotlib", *packages} & set(sys.modules)
    found = importlib.util.find_spec("reasoning_gym")
    assert found is not None
    assert found.origin is not None, "the package, not what stood in its place"
    for name, module in [*((name, ModuleType(name)) for name in packages), (alone.__name__, alone)]:
        monkeypatch.setitem(sys.modules, name, module)
    assert _chain_sum() is alone, "that of the package, where somebody has imported it"
