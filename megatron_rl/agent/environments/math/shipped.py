"""Named data sets of mathematics: their paths on the hub, and the columns of question and answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import model_validator

from megatron_rl.agent.environments.math.math_environment import MathConfig, MathEnvironment

SAMPLES = Path(__file__).parent / "samples"
"""A few made-up rows in the format of each data set, by its name."""

DAPO = {
    "path": "BytedTsinghua-SIA/DAPO-Math-17k",
    "question": "prompt.0.content",
    "answer": "reward_model.ground_truth",
    "remove": [  # its own instructions, which request a different answer format
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.",
        'Remember to put your answer on its own line after "Answer:".',
    ],
}
AIME = {"path": "Maxwell-Jia/AIME_2024", "question": "Problem", "answer": "Answer"}
GSM8K = {"path": "openai/gsm8k", "subset": "main", "question": "question", "answer": "answer", "answer_after": "####"}
MATH = {"path": "DigitalLearningGmbH/MATH-lighteval", "question": "problem", "answer": "solution", "answer_boxed": True}
MATH_500 = {"path": "HuggingFaceH4/MATH-500", "split": "test", "question": "problem", "answer": "answer"}
OPEN_MATH = {
    "path": "nvidia/OpenMathInstruct-2",
    "split": "train_1M",
    "question": "problem",
    "answer": "expected_answer",
}
BIG_MATH = {"path": "SynthLabsAI/Big-Math-RL-Verified", "question": "problem", "answer": "answer"}


def _environment(name: str, description: str, **defaults: Any) -> type[MathEnvironment]:
    """Make an environment of mathematics with a default data set.

    defaults: its arguments if neither `train` nor `evaluate` is given.
    """

    class ShippedConfig(MathConfig):
        @model_validator(mode="before")
        @classmethod
        def _on_its_own_data(cls, values: Any) -> Any:
            if not isinstance(values, Mapping) or "train" in values or "evaluate" in values:
                return values
            return {**defaults, **values}

    class Shipped(MathEnvironment):
        Config = ShippedConfig

        @classmethod
        def sample_arguments(cls) -> Mapping[str, Any]:
            shipped = {"path": str(SAMPLES / f"{name}.jsonl"), "split": "train", "subset": None}
            if "train" in defaults:
                return {"train": {**defaults["train"], **shipped}, "verifiers": 1}
            return {"evaluate": {set: {**its, **shipped} for set, its in defaults["evaluate"].items()}, "verifiers": 1}

    Shipped.__doc__ = description
    return Shipped


DapoMath17k = _environment(
    "dapo-math-17k", "DAPO-Math-17k: 17 thousand distinct competition problems with integer answers.", train=DAPO
)
Aime2024 = _environment(
    "aime-2024", "AIME 2024: the thirty problems of that year, for evaluation only.", evaluate={"aime_2024": AIME}
)
Gsm8k = _environment(
    "gsm8k",
    "GSM8K: grade school word problems, with its test problems as evaluation set gsm8k_test.",
    train=GSM8K,
    evaluate={"gsm8k_test": {**GSM8K, "split": "test"}},
)
Math = _environment(
    "math",
    "Mathematics from any data set (train, evaluate); by default MATH, with MATH-500 as evaluation set math_500.",
    train=MATH,
    evaluate={"math_500": MATH_500},
)
OpenMathInstruct2 = _environment(
    "open-math-instruct-2",
    "OpenMathInstruct-2: the distinct problems of its first million rows, two in a thousand held out.",
    train=OPEN_MATH,
    held_out=0.002,
)
BigMath = _environment(
    "big-math",
    "Big-Math: a quarter of a million verified problems, four in a thousand held out.",
    train=BIG_MATH,
    held_out=0.004,
)
