"""The only place that names a file of a run. Nothing is created by asking for a path.

Where a docstring names a record, its type in `attempt_records` or `run_records` says who writes and reads it.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.contract.files import AnyPath, names_in

TRAIN = "train"  # step of an attempt whose ranks train
CARRIED = "huggingface"  # folder in a converted checkpoint: config.json, tokenizer and what else came with the weights


class RunDir:
    """Paths of one run."""

    def __init__(self, root: AnyPath) -> None:
        self.root = Path(root)

    # What was asked

    @property
    def recipe(self) -> Path:
        """The recipe as the user gave it."""
        return self.root / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        """The recipe with every default written out. A directory with this file in it is a run's."""
        return self.root / "resolved.yaml"

    @property
    def identity(self) -> Path:
        """RunIdentity."""
        return self.root / "run.json"

    @property
    def changes(self) -> Path:
        """RecipeChange, a line for each `--change` of a resumed run."""
        return self.root / "changes.jsonl"

    @property
    def plan(self) -> Path:
        """PlanRecord."""
        return self.root / "plan.json"

    @property
    def script(self) -> Path:
        """The sbatch script of this run; submitting it again goes on with the run."""
        return self.root / "job.sbatch"

    @property
    def code(self) -> Path:
        """Snapshot of the code that runs, first on the ranks' PYTHONPATH; a link to the newest one."""
        return self.root / "code"

    @property
    def code_record(self) -> Path:
        """CodeSnapshot."""
        return self.code / "SNAPSHOT.json"

    @property
    def kept_files(self) -> Path:
        """Copies of files of the user's code."""
        return self.root / "files"

    @property
    def kept_files_record(self) -> Path:
        """KeptFiles."""
        return self.kept_files / "FILES.json"

    @property
    def job(self) -> Path:
        """Owner: the Slurm job that owns this run, or was the last to."""
        return self.root / "job.json"

    @property
    def job_lock(self) -> Path:
        """flock of the batch script that is running this run."""
        return self.root / ".job.lock"

    @property
    def batch_log(self) -> Path:
        """Output of the batch script, all attempts in one. Beside the run directory, because Slurm opens it before the
        job can create anything."""
        return self.root.with_name(self.root.name + ".log")

    @property
    def fork(self) -> Path:
        """Fork."""
        return self.root / "fork.json"

    @property
    def lock(self) -> Path:
        """flock of the one owner; its text is a LockOwner."""
        return self.root / ".lock"

    @property
    def token(self) -> Path:
        """One line that opens the listeners of this run's ranks: for its owner's eyes alone, never in an argument, a
        log or a script. Written by the host side before any rank starts."""
        return self.root / "token"

    # What happened

    @property
    def attempts_ledger(self) -> Path:
        """AttemptStart and AttemptEnd, a line for each start and end of an attempt."""
        return self.root / "attempts.jsonl"

    @property
    def goodput(self) -> Path:
        """Where every GPU-second of all attempts went; written anew at each attempt's end, for people."""
        return self.root / "goodput.json"

    @property
    def done(self) -> Path:
        """Done: present = finished."""
        return self.root / "DONE"

    @property
    def metrics(self) -> Path:
        """MetricsLine, one a step."""
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """MetricsLine, one an evaluation; step 0 is the model before training."""
        return self.root / "evaluations.jsonl"

    @property
    def evaluation(self) -> Path:
        """EvaluationResult of a job that evaluates another run's checkpoint, with its answers beside it."""
        return self.root / "evaluation.json"

    @property
    def evaluation_results(self) -> Path:
        """Folder of what `mrl evaluate` found of this run, an EvaluationResult each with its answers beside it."""
        return self.root / "evaluations"

    def samples(self, step: int) -> Path:
        """Sample rollouts of one step, as text."""
        return self.root / "rollouts" / "samples" / f"step-{step:06d}.txt"

    @property
    def bank(self) -> Path:
        """Folder of the answers that are paid for and not yet trained on."""
        return self.root / "rollouts" / "bank"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """WandbRun."""
        return self.root / "wandb.json"

    @property
    def wandb_files(self) -> Path:
        """Folder of wandb's own files: the record once more, as the newest attempt tells it."""
        return self.root / "wandb"

    @property
    def checkpoints(self) -> Path:
        """Folder of all checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Folder of one published checkpoint."""
        return self.checkpoints / f"step-{step:06d}"

    @property
    def exports(self) -> Path:
        """Folder of all exports: weights in Hugging Face's format."""
        return self.root / "hf"

    def export(self, step: int) -> Path:
        """Folder of the export of one checkpoint; it is there once it is whole."""
        return self.exports / f"step-{step:06d}"

    def checkpoint_under_way(self, step: int, save_id: str) -> Path:
        """Where a save is written until it is published; every `.tmp` is debris once its processes are gone."""
        return self.checkpoints / f"step-{step:06d}.{save_id}.tmp"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a published checkpoint, newest first; whether it is intact is another question. Raises
        OSError where the folder is there and cannot be listed."""
        return _steps_in(self.checkpoints)

    def export_steps(self) -> list[int]:
        """Steps that have a whole export, newest first. Raises OSError where the folder is there and cannot be
        listed."""
        return _steps_in(self.exports)

    @property
    def latest_checkpoint(self) -> Path:
        """Text file with the name of the newest published checkpoint."""
        return self.checkpoints / "latest"

    def attempt(self, number: int) -> Attempt:
        """The files of one attempt."""
        return Attempt(self, number)

    def last_attempt(self) -> int:
        """Number of the newest attempt, 0 before the first. Raises OSError where the folder is there and cannot be
        listed."""
        return max([int(name) for name in names_in(self.root / "attempts") if re.match(r"^[0-9]+$", name)] or [0])


def _steps_in(folder: Path) -> list[int]:
    names = names_in(folder)
    return sorted((int(name[5:]) for name in names if re.match(r"^step-[0-9]{6,}$", name)), reverse=True)


class RankFiles:
    """Files of the ranks of one world: how each of them is, and how they leave."""

    def __init__(self, folder: Path, logs: Path, role: str) -> None:
        """role: step of the attempt, such as `train`; names their logs."""
        self.folder = folder
        self.logs = logs
        self.role = role

    @property
    def drain(self) -> Path:
        """Drain: present = stop at the next safe point."""
        return self.folder / "drain.json"

    @property
    def outcome(self) -> Path:
        """Outcome."""
        return self.folder / "outcome.json"

    @property
    def progress(self) -> Path:
        """Progress; replaced, never appended."""
        return self.folder / "progress.json"

    def address(self, name: str) -> Path:
        """Address of a listener of these ranks, such as `train` (their rendezvous)."""
        return self.folder / "addresses" / f"{name}.json"

    def error(self, rank: int) -> Path:
        """RankError of one rank."""
        return self.folder / f"error.{rank}.json"

    def errors(self) -> list[Path]:
        """Error files written so far, lowest rank first. Raises OSError where the folder is there and cannot be
        listed."""
        found = [re.match(r"^error\.([0-9]+)\.json$", name) for name in names_in(self.folder)]
        return [self.error(rank) for rank in sorted(int(match.group(1)) for match in found if match)]

    @property
    def heartbeats(self) -> Path:
        """Folder of the ranks' heartbeats."""
        return self.folder / "heartbeats"

    def heartbeat(self, rank: int) -> Path:
        """Heartbeat of one rank."""
        return self.heartbeats / f"{rank}.json"

    @property
    def image(self) -> Path:
        """Text file with the path of the container image that the steps of the attempt were given."""
        return self.folder / "image"

    @property
    def hang(self) -> Path:
        """Hang."""
        return self.folder / "hang.json"

    @property
    def srun(self) -> Path:
        """What srun says of the step itself, such as `node05: task 3: Killed`."""
        return self.folder / f"srun.{self.role}"

    def stacks(self, rank: int, role: str | None = None) -> Path:
        """Where every thread of a rank was, each time it got STACKS_SIGNAL. role: another step's."""
        return self.logs / f"{role or self.role}.{rank}.stacks"

    def log(self, rank: int, role: str | None = None) -> Path:
        """Output of one rank. role: another step's."""
        return self.logs / f"{role or self.role}.{rank}.log"


class Attempt(RankFiles):
    """Files of one attempt, one start of the ranks: of those that train, and what there is once."""

    def __init__(self, run: RunDir, number: int) -> None:
        name = f"{number:03d}"
        super().__init__(run.root / "attempts" / name, run.root / "logs" / ("attempt-" + name), TRAIN)
        self.number = number
        self.latest_logs = run.root / "logs" / "latest"

    @property
    def requeued(self) -> Path:
        """Requeued."""
        return self.folder / "requeued.json"

    @property
    def kernels(self) -> Path:
        """Kernels."""
        return self.folder / "kernels.json"

    @property
    def nodes(self) -> Path:
        """NodeAssignment."""
        return self.folder / "nodes.json"

    @property
    def marks(self) -> Path:
        """Marks."""
        return self.folder / "marks.json"

    def health(self, host: str) -> Path:
        """NodeHealth of one node."""
        return self.folder / "health" / f"{host}.json"

    def unpacked(self, host: str) -> Path:
        """Empty file: the container image is unpacked on this node."""
        return self.folder / "unpacked" / host

    @property
    def fabric(self) -> Path:
        """FabricReport."""
        return self.folder / "fabric.json"

    @property
    def timeline(self) -> Path:
        """TimelineLine, one per stretch of time. The seconds of a line are those of all ranks since the line before it;
        the first: since `began`."""
        return self.folder / "timeline.jsonl"

    def replica(self, number: int) -> Replica:
        """The files of one inference replica of this attempt."""
        return Replica(self, number)

    def replicas(self) -> list[Replica]:
        """Those that have been started, lowest number first. Raises OSError where the folder is there
        and cannot be listed."""
        names = names_in(self.folder / "replicas")
        return [Replica(self, number) for number in sorted(int(name) for name in names if re.match(r"^[0-9]+$", name))]


class Replica(RankFiles):
    """Files of the ranks of one inference replica, a world of its own. A later start of it in the same attempt writes
    the same ones; it is asked to leave with the attempt."""

    def __init__(self, attempt: Attempt, number: int) -> None:
        super().__init__(attempt.folder / "replicas" / str(number), attempt.logs, f"infer-{number}")
        self.attempt = attempt
        self.number = number

    @property
    def drain(self) -> Path:
        return self.attempt.drain

    @property
    def image(self) -> Path:
        return self.attempt.image

    @property
    def state(self) -> Path:
        """ReplicaState."""
        return self.folder / "state.json"

    @property
    def listener(self) -> Path:
        """ReplicaAddress."""
        return self.folder / "address.json"
