"""Calls of enroot, with time limits."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Callable

from launcher.host.image.reference import ImageError, ImageReference
from launcher.host.process.limited import run_limited
from megatron_rl.contract.child import Child

IMPORT_LIMIT = 7200.0  # seconds for one import: tens of GB over a slow link
DIGEST_LIMIT = 120.0  # seconds for one query to the registry
TICK = 0.5  # seconds between polls of the import
SQUASH_OPTIONS = "-comp zstd -Xcompression-level 3 -b 1M -exit-on-error"  # fast to write, fast to read

Report = Callable[[str], None]


def ask_digest(reference: ImageReference, report: Report) -> str | None:
    try:
        answer = run_limited(["enroot", "digest", reference.uri()], DIGEST_LIMIT)
    except FileNotFoundError:
        raise ImageError(_no_enroot()) from None
    except subprocess.TimeoutExpired:
        report(f"the registry did not resolve {reference.uri()} within {DIGEST_LIMIT:.0f} s")
        return None
    # The last line only: enroot is a bash script, and BASH_ENV may print something before its answer.
    digest = answer.stdout.decode("utf-8", "replace").strip().rpartition("\n")[2]
    if answer.returncode == 0 and re.match("^sha256:[0-9a-f]{64}$", digest):
        return digest
    last_line = answer.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    reason = " ".join(last_line) or "no reason given"
    report(f"enroot did not resolve {reference.uri()} (it can from 4.0 on): {reason}")
    return None


def run_import(reference: ImageReference, output: Path, log: Path, report: Report) -> None:
    """Run `enroot import` into the squashfs file `output`, within IMPORT_LIMIT. Its output goes to `log` and, line by
    line, to `report`. Raises ImageError."""
    command = ["enroot", "import", "--output", str(output), reference.uri()]
    env = dict(os.environ)
    env.setdefault("ENROOT_SQUASH_OPTIONS", SQUASH_OPTIONS)
    with log.open("w+b") as output_log:
        try:
            process = Child(command, env, output=output_log)
        except FileNotFoundError:
            raise ImageError(_no_enroot()) from None
        give_up = time.monotonic() + IMPORT_LIMIT
        try:
            with log.open(encoding="utf-8", errors="replace") as reader:
                while process.exit_code() is None and time.monotonic() < give_up:
                    time.sleep(TICK)
                    _pass_on(reader.read(), report)
                _pass_on(reader.read(), report)
        finally:
            code = process.exit_code()
            process.close()
    if code != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        late = code is None
        why = f"took longer than {IMPORT_LIMIT:.0f} s" if late else " ".join(last) or f"exit code {code}"
        raise ImageError(f"{command[-1]}: {why}{_advice(why)}")


def _pass_on(text: str, report: Report) -> None:
    for line in text.splitlines():
        report(line)


def _advice(why: str) -> str:
    if re.search(r"\b(401|403)\b|[Uu]nauthorized|[Ff]orbidden", why):
        return "; credentials: see containers/README.md, $ENROOT_CONFIG_PATH/.credentials (~/.config/enroot)"
    if "404" in why:
        return "; no such image or tag in that registry: check image.reference"
    if "No space left" in why:
        return "; enroot unpacks in $ENROOT_TEMP_PATH (default $TMPDIR, /tmp): set it in the profile's environment"
    return ""


def _no_enroot() -> str:
    where = socket.gethostname()
    return (
        f"enroot is not on PATH on {where}: load its module in the profile's prolog, import on the other side "
        "(image.import_on), or give the path of a squashfs file"
    )
