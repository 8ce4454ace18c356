"""Rehearse one rank for each line of JSON on stdin, and write the result as a line of JSON to stdout."""

from __future__ import annotations

import json
import sys

import megatron_rl.model.platform.megatron_core  # noqa: F401 - before megatron-core itself
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.rehearse.run import rehearse


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        config = RunConfig.model_validate(request.pop("config"))
        sys.stdout.write(json.dumps(rehearse(config, **request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
