"""The process behind environments/math/verifier.py: two answers in, whether they are equal out, a JSON line each.

    python -m megatron_rl.environments.math.verifier_child LIMIT_S MEMORY_BYTES

It ends when its input does, when one comparison takes longer than LIMIT_S, and when memory runs out.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

READY = b"ready\n"
"""The first line: math-verify is imported, comparisons may come."""


def main() -> None:
    limit_s, memory = float(sys.argv[1]), int(sys.argv[2])
    # What the ranks' process group is told is no business of this process: it lives as long as its input is open.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no reply
    logging.disable(logging.WARNING)  # math-verify warns that we keep the time ourselves
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    from math_verify import parse, verify  # takes a second, and the limits hold for it too

    os.write(replies, READY)
    for line in sys.stdin:
        golden, answer = json.loads(line)
        # The kernel's default for this signal ends the process even within a sympy that never returns to Python; the
        # parent usually kills earlier, but it may have died itself.
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            read = [parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True) for text in (golden, answer)]
            equal = bool(verify(*read, timeout_seconds=None, raise_on_error=True))
        except MemoryError:
            os._exit(1)  # no verdict, and what is left of this process is not to be trusted
        except Exception:  # noqa: BLE001 - math-verify raises anything on text it cannot read: that is no right answer
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, json.dumps(equal).encode() + b"\n")


if __name__ == "__main__":
    main()
