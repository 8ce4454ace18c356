"""What the batch script does around its steps, one subcommand each:

    python3 -m launcher.host.job own | create | open | pythonpath | mark | nodes | watch | drain | close | left

The script exports MRL_RUN_DIR, MRL_CLUSTER and, once `open` has named it, MRL_ATTEMPT. Slurm's own variables say which
job this is. What goes wrong is one line on stderr and exit code 2.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from typing import List, Optional

from launcher.host.attempt.begin import come_back_later, create, open_attempt, own, pythonpath
from launcher.host.attempt.close import close
from launcher.host.attempt.context import Here, Refused
from launcher.host.attempt.drain import drain
from launcher.host.attempt.nodes import choose_nodes, left
from launcher.host.attempt.watch import watch
from launcher.host.code import snapshot
from launcher.host.process.output import Saying
from launcher.host.record import goodput
from launcher.host.slurm import client
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.files import FULL


def mark(here: Here, options: argparse.Namespace) -> int:
    """Note how far the attempt has got."""
    goodput.mark(here.attempt, options.what, time.time())
    return EXIT_FINISHED


COMMANDS = {
    "own": own,
    "create": create,
    "open": open_attempt,
    "pythonpath": pythonpath,
    "mark": mark,
    "nodes": choose_nodes,
    "watch": watch,
    "drain": drain,
    "close": close,
    "left": left,
}
BEFORE_AN_ATTEMPT = (own, create, open_attempt)


def main(arguments: Optional[List[str]] = None) -> int:
    options = _parse(arguments)
    command = COMMANDS[options.command]
    with contextlib.redirect_stdout(Saying(sys.stdout)), contextlib.redirect_stderr(Saying(sys.stderr)):
        try:
            here = Here(dict(os.environ))
            try:
                return command(here, options)
            except OSError as error:
                if error.errno not in FULL or command not in BEFORE_AN_ATTEMPT:
                    raise
                return come_back_later(here, error)
        except (Refused, snapshot.SnapshotError, client.SlurmRefused, OSError) as error:
            print("error: {}".format(error), file=sys.stderr)
            return EXIT_USAGE


def _parse(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m launcher.host.job", description="Around the steps of a job.")
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    one = {name: commands.add_parser(name, help=(run.__doc__ or "").split("\n")[0]) for name, run in COMMANDS.items()}
    one["own"].add_argument("--lock", type=int, required=True, help="descriptor of the file to lock")
    for name in ("recipe", "resolved", "plan", "sources", "script"):
        one["create"].add_argument("--" + name, required=True, help="file that holds it")
    one["mark"].add_argument("what", choices=["image", "ready"])
    one["nodes"].add_argument("step", nargs="?", help="a step of the plan, or `fit`: all nodes not known to be bad")
    one["nodes"].add_argument("--checked", action="store_true", help="nodes without a good health report are bad")
    one["watch"].set_defaults(interrupt=signal.SIGUSR1)
    one["drain"].add_argument("--signal", required=True)
    for name in ("watch", "drain", "close"):
        one[name].add_argument("--notice", type=float, required=True, help="seconds of --signal")
    one["close"].add_argument("--backoff", type=float, required=True, help="seconds before a crashed run starts again")
    one["close"].add_argument("--code", help="what the training step ended with; left out: it never began")
    one["close"].add_argument("--here", action="store_true", help="another attempt may begin in this allocation")
    one["close"].add_argument("--unready", help="why it never began")
    one["close"].add_argument("--began", required=True, help="when the attempt began, in unix time")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
