"""Processes of this machine that hold a policy together: the one that opens it, and its followers:

python -m megatron_rl.standalone.followers WORLD < FOLLOWED.json
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NoReturn

import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.publish import CheckpointError
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.config import InferenceConfig
from megatron_rl.rank.standalone_world import StandaloneWorld
from megatron_rl.rank.world import die_with_parent
from megatron_rl.section import PositiveInt, Section
from megatron_rl.standalone.policy import OpenedPolicy, open_policy
from megatron_rl.standalone.siblings import siblings, world_of
from megatron_rl.standalone.source import Precision, Source, find_source

MODULE = "megatron_rl.standalone.followers"


class Followed(Section):
    """Arguments of `open_policy` that are the same on all ranks."""

    path: str
    dtype: Precision
    device: Literal["cpu", "cuda"]
    threads: PositiveInt | None
    max_length: PositiveInt | None
    inference: InferenceConfig | None
    tp: PositiveInt

    def opened(self, source: Source, world: StandaloneWorld) -> AbstractContextManager[OpenedPolicy]:
        """Call `open_policy` with these arguments. source: found by `path`."""
        return open_policy(
            source,
            device=self.device,
            threads=self.threads,
            max_length=self.max_length,
            inference=self.inference,
            tp=self.tp,
            world=world,
        )


@contextmanager
def open_with_followers(
    source: Source,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    max_length: int | None = None,
    inference: InferenceConfig | None = None,
    tp: int = 1,
    lost: Callable[[str], NoReturn],
) -> Iterator[OpenedPolicy]:
    """Call `open_policy` in this process and in tp - 1 further ones. lost: see `siblings`."""
    followed = Followed(
        path=str(source.folder),  # not the original path: a run may publish a newer checkpoint in between
        dtype=source.model.dtype,
        device=device,
        threads=threads,
        max_length=max_length,
        inference=inference,
        tp=tp,
    )
    with siblings(MODULE, followed.model_dump_json(), tp, lost) as world, followed.opened(source, world) as opened:
        yield opened


def main() -> int:
    """Run a follower, and return its exit code."""
    die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    asked = Followed.model_validate_json(sys.stdin.read())
    try:
        with asked.opened(find_source(asked.path, asked.dtype), world_of(sys.argv[1])) as opened:
            opened.engine.follow(nullcontext)
    except (ConfigurationError, CheckpointError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
