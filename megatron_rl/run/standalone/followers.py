"""Processes of this machine that hold a policy together: the one that opens it, and its followers:

python -m megatron_rl.run.standalone.followers WORLD < FOLLOWED.json
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NoReturn

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.source import PolicySource, Precision, find_source
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.generate.engine.opened_policy import OpenedPolicy, open_policy
from megatron_rl.rank.standalone_world import StandaloneWorld
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import InferenceConfig
from megatron_rl.recipe.section import PositiveInt, Section
from megatron_rl.run.standalone.siblings import siblings, world_of

MODULE = "megatron_rl.run.standalone.followers"


class Followed(Section):
    """Arguments of `open_policy` that are the same on all ranks."""

    path: str
    dtype: Precision
    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt | None = None
    max_length: PositiveInt | None = None
    inference: InferenceConfig | None = None
    tp: PositiveInt = 1

    def opened(self, source: PolicySource, world: StandaloneWorld) -> AbstractContextManager[OpenedPolicy]:
        options = {name: getattr(self, name) for name in type(self).model_fields.keys() - {"path", "dtype"}}
        return open_policy(source, world=world, **options)


@contextmanager
def open_with_followers(
    source: PolicySource, lost: Callable[[str], NoReturn], **options: Any
) -> Iterator[OpenedPolicy]:
    """Call `open_policy` in this process and in tp - 1 further ones. lost: see `siblings`. options: of `Followed`."""
    # The folder, not the path of the user: a run may publish a newer checkpoint in between.
    followed = Followed(path=str(source.folder), dtype=source.model.dtype, **options)
    asked = followed.model_dump_json()
    with siblings(MODULE, asked, followed.tp, lost) as world, followed.opened(source, world) as opened:
        yield opened


def main() -> int:
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
