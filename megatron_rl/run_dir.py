"""The run directory: the only place that names a file of a run, and the codes its processes exit with.

This is the contract between the launcher (login node, batch host) and the ranks (container), so it uses the
standard library only and reads on Python 3.6, the oldest python3 of a batch host.
"""

import errno
import json
import os
import re
import uuid
from pathlib import Path

EXIT_FINISHED = 0
EXIT_CRASHED = 1
EXIT_USAGE = 2  # of the command line itself
EXIT_UNKNOWN = 3  # of `mrl`: Slurm cannot be asked, so the answer is not known
EXIT_CONFIG = 78  # of a rank: bad configuration, never retried
EXIT_DRAINED = 75  # of a rank: saved, resume me
EXIT_INTERRUPTED = 130  # of the command line: Ctrl-C, saved

FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: no room on the disk, or none left to this user

HEARTBEAT_S = 10.0  # seconds between heartbeats, at most
HEARTBEAT_LEFT = "left"  # phase of the last heartbeat of a rank that leaves in order
HEARTBEAT_WAIT = "waiting for the other ranks"  # phase of a rank that waits for the others
SILENCE_VARIABLE = "MRL_SILENCE_S"  # environment of the ranks and of what watches them: job.silence_limit_s


class RunDir:
    """Paths of one run. Nothing is created by asking for a path."""

    def __init__(self, root):
        self.root = Path(root)

    # What was asked
    @property
    def recipe(self):
        return self.root / "recipe.yaml"

    @property
    def resolved(self):
        return self.root / "resolved.yaml"

    @property
    def changes(self):
        """One JSON line per `--change` of a resumed run."""
        return self.root / "changes.jsonl"

    @property
    def plan(self):
        """Who does what: launcher.plan.placement's plan as JSON."""
        return self.root / "plan.json"

    @property
    def script(self):
        """The sbatch script of this run; submitting it again goes on with the run."""
        return self.root / "job.sbatch"

    @property
    def code(self):
        """Snapshot of the code that runs, first on the ranks' PYTHONPATH."""
        return self.root / "code"

    @property
    def code_record(self):
        """Where the snapshot came from: {sources: [{path, commit, dirty, ...}], at}. Written last."""
        return self.code / "SNAPSHOT.json"

    @property
    def job(self):
        """{job_id, cluster, submitted_at, by}: the Slurm job that owns this run, or was the last to."""
        return self.root / "job.json"

    @property
    def job_lock(self):
        """flock of the batch script that is running this run."""
        return self.root / ".job.lock"

    @property
    def batch_log(self):
        """Output of the batch script, all attempts in one. Beside the run directory, because Slurm opens it before the
        job can create anything."""
        return self.root.with_name(self.root.name + ".log")

    @property
    def fork(self):
        """{from, step, at, by, changes}: the run and checkpoint that this one began as."""
        return self.root / "fork.json"

    @property
    def lock(self):
        """flock of the one owner; its text says who that is."""
        return self.root / ".lock"

    # What happened
    @property
    def attempts_ledger(self):
        return self.root / "attempts.jsonl"

    @property
    def goodput(self):
        """Where every GPU-second of all attempts went; written anew at each attempt's end."""
        return self.root / "goodput.json"

    @property
    def done(self):
        return self.root / "DONE"

    @property
    def metrics(self):
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self):
        """One JSON line per evaluation; step 0 is the model before training."""
        return self.root / "evaluations.jsonl"

    def samples(self, step):
        """Sample rollouts of one step, as text."""
        return self.root / "rollouts" / "samples" / "step-{:06d}.txt".format(step)

    @property
    def bank(self):
        """Folder of the answers that are paid for and not yet trained on."""
        return self.root / "rollouts" / "bank"

    @property
    def tensorboard(self):
        return self.root / "tensorboard"

    @property
    def wandb(self):
        """{id, url}: the W&B run that shows this one. Not in a checkpoint: a fork begins as one and has its own."""
        return self.root / "wandb.json"

    @property
    def wandb_files(self):
        """Folder of wandb's own files: the record once more, as the newest attempt tells it."""
        return self.root / "wandb"

    @property
    def checkpoints(self):
        return self.root / "checkpoints"

    def checkpoint(self, step):
        return self.checkpoints / "step-{:06d}".format(step)

    def checkpoint_under_way(self, step, save_id):
        """Where a save is written until it is published; every `.tmp` is debris once its processes are gone."""
        return self.checkpoints / "step-{:06d}.{}.tmp".format(step, save_id)

    def checkpoint_steps(self):
        """Steps that have a published checkpoint, newest first. Whether it is intact is another question."""
        names = os.listdir(str(self.checkpoints)) if self.checkpoints.is_dir() else []
        steps = [int(name[5:]) for name in names if re.match(r"^step-\d{6,}$", name)]
        return sorted(steps, reverse=True)

    @property
    def latest_checkpoint(self):
        """Text file with the name of the newest published checkpoint."""
        return self.checkpoints / "latest"

    def attempt(self, number):
        return Attempt(self, number)

    def last_attempt(self):
        """Number of the newest attempt, 0 before the first."""
        folder = self.root / "attempts"
        names = os.listdir(str(folder)) if folder.is_dir() else []
        return max([int(name) for name in names if re.match(r"^\d+$", name)] or [0])


class Attempt:
    """Files of one attempt: one start of the ranks."""

    def __init__(self, run, number):
        self.number = number
        self.folder = run.root / "attempts" / "{:03d}".format(number)
        self.logs = run.root / "logs" / "attempt-{:03d}".format(number)
        self.latest_logs = run.root / "logs" / "latest"

    @property
    def drain(self):
        """{cause, by, at, deadline}: present = stop at the next safe point."""
        return self.folder / "drain.json"

    @property
    def outcome(self):
        """{outcome: finished | drained, step}: written by rank 0 after its last save."""
        return self.folder / "outcome.json"

    @property
    def requeued(self):
        """{at, problem}: that what the ledger's line intends was done about the job, or what of it could not be."""
        return self.folder / "requeued.json"

    @property
    def progress(self):
        """{phase, step, ...}: what rank 0 is doing now, for the live view; replaced, never appended."""
        return self.folder / "progress.json"

    @property
    def nodes(self):
        """{working, steps: {step name: [hosts]}, spare: [hosts], bad: {host: reason}}: which node does what, by the
        plan for that many working nodes."""
        return self.folder / "nodes.json"

    @property
    def marks(self):
        """{image, ready}: when the image was there, and when the nodes had been chosen and the ranks were started."""
        return self.folder / "marks.json"

    @property
    def image(self):
        """Text file with the path of the container image that the steps were given."""
        return self.folder / "image"

    def health(self, host):
        """{ok, problems: [...], ...}: what the health check found on one node."""
        return self.folder / "health" / "{}.json".format(host)

    @property
    def fabric(self):
        """{hosts: [...], bad: {host: reason}, ...}: what the all-reduce between the nodes found."""
        return self.folder / "fabric.json"

    def address(self, name):
        """{host, port}: where a listener of this attempt can be reached, such as `train` (its rendezvous)."""
        return self.folder / "addresses" / "{}.json".format(name)

    def error(self, rank):
        return self.folder / "error.{}.json".format(rank)

    def errors(self):
        """Error files written so far, lowest rank first."""
        found = self.folder.glob("error.*.json")
        return sorted(found, key=lambda path: int(path.name.split(".")[1]))

    @property
    def timeline(self):
        """One JSON line per stretch of time: {at, step, seconds: {category: seconds summed over all ranks}}. The
        seconds of a line are those of all ranks since the line before it (the first: since `began`)."""
        return self.folder / "timeline.jsonl"

    def heartbeat(self, rank):
        """{rank, ranks, host, phase, step, entered, at, written, every}: when the rank last got on with its work
        (`at`), with what, and when this was written."""
        return self.heartbeats / "{}.json".format(rank)

    @property
    def heartbeats(self):
        return self.folder / "heartbeats"

    @property
    def hang(self):
        """{rank, host, phase, step, silent_s, at}: the rank that was silent for too long. Written by whoever ends the
        ranks for it."""
        return self.folder / "hang.json"

    def stacks(self, rank, role="train"):
        """Where every thread of a rank was, each time it got SIGQUIT."""
        return self.logs / "{}.{}.stacks".format(role, rank)

    @property
    def srun(self):
        """What srun says of the training step itself, such as `node05: task 3: Killed`."""
        return self.folder / "srun.train"

    def log(self, rank, role="train"):
        return self.logs / "{}.{}.log".format(role, rank)


def write_atomic(path, text, durable=True):
    """Write `text` so that readers and a crash see either the old file or the whole new one. What is written every few
    seconds need not be `durable`: it may be lost when the machine's power fails."""
    path = Path(str(path))
    # A process id is unique on its node only, and the nodes share the file system.
    temporary = path.with_name(".{}.{}.tmp".format(path.name, uuid.uuid4().hex))
    try:
        with open(str(temporary), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(str(temporary), str(path))
    finally:
        if temporary.exists():
            temporary.unlink()


def write_json(path, value, durable=True):
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True) + "\n", durable)


def append_json_line(path, value):
    """Append one JSON line in a single write. A torn last line, left by a crash, is ended first and stays by itself."""
    line = (json.dumps(value, sort_keys=True) + "\n").encode("utf-8")
    with open(str(path), "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def read_json(path):
    """The value in `path`, or None where there is no such file yet."""
    try:
        with open(str(path), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def read_json_lines(path):
    """The whole lines of a JSON-lines file; what a crash tore, wherever it stands by now, is left out."""
    try:
        with open(str(path), "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line.decode("utf-8")))
        except ValueError:  # empty or torn
            continue
    return found
