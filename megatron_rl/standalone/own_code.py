"""Check of a recipe's own functions, such as its policy loss, on a tiny batch:

    python -m megatron_rl.standalone.own_code < GRPO.json

GRPO.json holds the section `grpo` of a recipe. Writes a JSON object per problem to stdout: the key and the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.losses.choice import own_policy_loss
from megatron_rl.algorithms.own_baseline import own_baseline
from megatron_rl.contract.codes import EXIT_FINISHED
from megatron_rl.errors import ConfigurationError
from megatron_rl.rank.world import die_with_parent

CHECKS: Mapping[str, Callable[[GrpoConfig], object]] = {"policy_loss": own_policy_loss, "baseline": own_baseline}
"""Key of `grpo` that may name a function of the user's -> check, which raises ConfigurationError."""


def main() -> int:
    die_with_parent()
    config = GrpoConfig.model_validate_json(sys.stdin.read())
    output, sys.stdout = sys.stdout, sys.stderr  # keep prints of the user's code out of the output
    for key in config.own_functions:
        try:
            CHECKS[key](config)
        except ConfigurationError as error:
            output.write(json.dumps({"key": f"grpo.{key}", "problem": str(error)}) + "\n")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
