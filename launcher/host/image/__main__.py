"""Import a container image once and print the path of its squashfs file; progress goes to stderr:

    python3 -m launcher.host.image --reference nvcr.io#nvidia/pytorch:25.06-py3 --cache RUN_ROOT/cache/images

A reference that is a path is checked and printed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from launcher.host.image.cache import import_image
from launcher.host.image.reference import ImageError
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m launcher.host.image", description="Import a container image once; print its squashfs file."
    )
    parser.add_argument("--reference", required=True, help="[REGISTRY#]IMAGE[:TAG] or a path")
    parser.add_argument("--cache", required=True, type=Path, help="shared directory, RUN_ROOT/cache/images")
    parser.add_argument("--refresh", action="store_true", help="resolve a tag again")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception runs every `finally`, which ends enroot
        signal.signal(number, lambda signum, frame: sys.exit(128 + signum))
    try:
        print(import_image(options.reference, options.cache, options.refresh))
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CRASHED
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
