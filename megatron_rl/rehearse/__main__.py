"""Rehearse ranks: one a line as JSON on stdin, and what came of it on a line of stdout."""

from __future__ import annotations

import json
import sys

import megatron_rl.platform.megatron_core  # noqa: F401 - before megatron-core itself
from megatron_rl.config import RunConfig
from megatron_rl.rehearse.run import rehearse


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        config = RunConfig.model_validate(asked.pop("config"))
        sys.stdout.write(json.dumps(rehearse(config, **asked)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
