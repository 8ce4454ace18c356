"""The host side of a Slurm job: the one process that decides when what its script says is started, and what becomes
of it. The script ends with

    exec python3 -m launcher.host.job run --script SCRIPT --notice 600 ...

Slurm's variables say which job this is, MRL_RUN_DIR and MRL_CLUSTER which run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time

from launcher.host.process.output import QuietStream
from launcher.host.process.signals import Signals

REQUESTS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEARD_VARIABLE = "MRL_HEARD"  # signals that the script got before this process


def main(arguments: list[str] | None = None) -> int:
    signals = Signals(REQUESTS)  # at once: until here they are ignored
    options = _parse(arguments)
    for name in os.environ.pop(HEARD_VARIABLE, "").split():
        signals.add(name)
    environ = dict(os.environ)
    _use_zone_of_host()
    with contextlib.redirect_stdout(QuietStream(sys.stdout)), contextlib.redirect_stderr(QuietStream(sys.stderr)):
        try:
            return _run(options, environ, signals)
        except (ImportError, SyntaxError) as error:  # half of the code is there, or this Python is no good
            return _leave_to_script(options.script, f"{sys.executable}: {error}")


def _run(options: argparse.Namespace, environ: dict[str, str], signals: Signals) -> int:
    # Only now: signals are heard, and what is missing can be told.
    from launcher.host.attempt.harvest import HarvestSettings
    from launcher.host.attempt.job_context import Refused, context_of
    from launcher.host.attempt.prepare import Checks
    from launcher.host.attempt.slurm_run import JobSettings, run_job
    from launcher.host.attempt.slurm_steps import Script
    from megatron_rl.contract.codes import EXIT_USAGE

    checks = Checks(options.image, options.image_cache, options.unpack, options.health, options.fabric)
    script = Script(os.path.abspath(options.script))
    harvest = HarvestSettings(options.harvest, options.harvest_sbatch)
    settings = JobSettings(script, options.notice, options.backoff, options.outlives_nodes, checks, harvest)
    try:
        context = context_of(environ)._replace(run_mode=int(options.run_mode, 8))
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_job(context, settings, signals)


def _use_zone_of_host() -> None:
    """Have this process read and write times as slurmstepd of this host does: TZ in somebody's shell is not its zone.
    The steps get it all the same."""
    if os.environ.pop("TZ", None) is not None:
        time.tzset()


def _leave_to_script(script: str, why: str) -> int:
    """Have the script's few lines of bash send the job elsewhere."""
    print(f"error: {why}", file=sys.stderr)
    os.execvp("bash", ["bash", script, "elsewhere", why])


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m launcher.host.job", description="The host side of a Slurm job.")
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    run = commands.add_parser("run", help="run the run of this job, as far as it goes")
    run.add_argument("--script", required=True, help="the sbatch script: what is started, and documents")
    run.add_argument("--notice", type=float, required=True, help="seconds of --signal before the time limit")
    run.add_argument("--backoff", type=float, required=True, help="seconds before a crashed run starts again")
    run.add_argument("--run-mode", default="700", help="of a run directory that has to be made")
    run.add_argument("--outlives-nodes", action="store_true", help="the job goes on without nodes that die (--no-kill)")
    run.add_argument("--image", help="reference of the container image")
    run.add_argument("--image-cache", default="", help="shared directory of imported images")
    run.add_argument("--unpack", action="store_true", help="have each node unpack it first, once for all steps")
    run.add_argument("--harvest", type=int, default=0, help="inference replicas in jobs of their own, at most")
    run.add_argument("--harvest-sbatch", action="append", default=[], help="an option of sbatch for those jobs")
    run.add_argument("--health", action="store_true", help="check the nodes first")
    run.add_argument("--fabric", action="store_true", help="and that they reach each other, fast")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
