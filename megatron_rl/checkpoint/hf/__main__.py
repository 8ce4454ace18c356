"""Conversion in a separate process, for `mrl convert`:

    python -m megatron_rl.checkpoint.hf hf-to-megatron SRC DST
    python -m megatron_rl.checkpoint.hf megatron-to-hf SRC DST

Prints the result on stdout as one JSON object, and errors on stderr in one line.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.checkpoint.publish import newest_step
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE
from megatron_rl.recipe.hub import local_folder


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.checkpoint.hf", description="Convert weights.")
    parser.add_argument("direction", choices=["hf-to-megatron", "megatron-to-hf"])
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--shard-bytes", type=int, required=True)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--adapters", action="store_true", help="write adapters alone, without their base")
    options = parser.parse_args(arguments)
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # so that half-written files are deleted
    try:
        done = _convert(options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        return EXIT_INTERRUPTED
    except (CheckpointError, ConfigurationError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"{where}{error.strerror or error}; nothing was written\n")
        return EXIT_CRASHED
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({**done, "peak_memory_bytes": peak}) + "\n")
    return EXIT_FINISHED


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _convert(options: argparse.Namespace) -> dict[str, Any]:
    """Convert, with imports that take seconds and so come after the signal handlers."""
    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.checkpoint.hf.to_hf import Converted, to_hugging_face
    from megatron_rl.checkpoint.hf.to_megatron import to_megatron
    from megatron_rl.rank.standalone_world import StandaloneWorld, connected

    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    convert: Callable[..., Converted] = to_megatron
    if options.direction == "hf-to-megatron":
        try:
            source = local_folder(options.source, "SRC", CONFIG_FILE)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    else:
        convert = partial(to_hugging_face, adapters_only=options.adapters)
        run = RunDir(options.source)
        if run.resolved.is_file():
            options.source = str(run.checkpoint(newest_step(run)))
        source = Path(options.source)
    with connected(StandaloneWorld.single()) as (platform, _):
        done = convert(source, options.target, platform, shard_bytes=options.shard_bytes, replace=options.force)
    return {"source": options.source, "target": str(options.target), **asdict(done)}


if __name__ == "__main__":
    sys.exit(main())
