"""The host side of a Slurm job: one process that starts the steps of the script, watches them and decides about the
job. The script ends with

    exec python3 -c "... from launcher.host.job import main ..." run --script SCRIPT --notice 600 ...

Slurm's variables identify the job, MRL_RUN_DIR and MRL_CLUSTER the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time

from launcher.host.attempt.harvest import HarvestSettings
from launcher.host.attempt.job_context import JobRefused, context_of
from launcher.host.attempt.notify import NotifySettings
from launcher.host.attempt.prepare import Checks
from launcher.host.attempt.slurm_run import JobSettings, run_job
from launcher.host.process.output import QuietStream
from launcher.host.process.signals import Signals
from megatron_rl.contract.codes import EXIT_USAGE
from megatron_rl.contract.files import only_owner_writes
from megatron_rl.contract.paths import OF_REPLICAS

REQUESTS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEARD_VARIABLE = "MRL_HEARD"  # names of signals that the script received before this process


@only_owner_writes()
def main(arguments: list[str] | None = None) -> int:
    signals = Signals(REQUESTS)
    for name in os.environ.pop(HEARD_VARIABLE, "").split():
        signals.add(name)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)  # those that came while this module was imported
    options = _parse(arguments)
    environ = dict(os.environ)
    _use_zone_of_host()
    with contextlib.redirect_stdout(QuietStream(sys.stdout)), contextlib.redirect_stderr(QuietStream(sys.stderr)):
        return _run(options, environ, signals)


def _run(options: argparse.Namespace, environ: dict[str, str], signals: Signals) -> int:
    images = {"": options.image, OF_REPLICAS: options.replica_image}
    images = {of: reference for of, reference in images.items() if reference is not None}
    checks = Checks(images, options.image_cache, options.unpack, options.health, options.fabric)
    harvest = HarvestSettings(options.harvest, options.harvest_sbatch)
    script = os.path.abspath(options.script)
    notify = NotifySettings.parse(options.notify) if options.notify else None
    settings = JobSettings(script, options.notice, options.backoff, options.outlives_nodes, checks, harvest, notify)
    try:
        context = context_of(environ)
    except JobRefused as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_job(context, settings, signals)


def _use_zone_of_host() -> None:
    """Use this host's zone for times, as slurmstepd does, and not the user's TZ, which the steps still get."""
    if os.environ.pop("TZ", None) is not None:
        time.tzset()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launcher.host.job", description="The host side of a Slurm job.")
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    run = commands.add_parser("run", help="run the attempts of this job's run")
    run.add_argument("--script", required=True, help="the sbatch script, which has the steps")
    run.add_argument("--notice", type=float, required=True, help="seconds of --signal before the time limit")
    run.add_argument("--backoff", type=float, required=True, help="seconds before a crashed run starts again")
    run.add_argument("--outlives-nodes", action="store_true", help="the job survives nodes that die (--no-kill)")
    run.add_argument("--image", help="reference of the container image")
    run.add_argument("--image-cache", default="", help="shared directory of imported images")
    run.add_argument("--replica-image", help="reference of the image of inference replicas, if they have their own")
    run.add_argument("--unpack", action="store_true", help="unpack images on each node first, once for all steps")
    run.add_argument("--harvest", type=int, default=0, help="most inference replicas in separate jobs")
    run.add_argument("--harvest-sbatch", action="append", default=[], help="an option of sbatch for those jobs")
    run.add_argument("--notify", help="the recipe's section `notify`, as JSON")
    run.add_argument("--health", action="store_true", help="check the nodes first")
    run.add_argument("--fabric", action="store_true", help="check the network between the nodes")
    return parser.parse_args(arguments)
