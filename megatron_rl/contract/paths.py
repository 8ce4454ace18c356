"""Names of all files of a run. Creating these objects creates no file.

If the description of a file is the name of a record, that type in `attempt_records` or `run_records` documents its
writers and readers.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.contract.files import AnyPath, names_in

TRAIN = "train"  # step of an attempt whose ranks train
INFER, TEACHER, REWARD = "infer", "teacher", "reward"
"""Kinds of replicas: those that generate, and those that hold the teacher or the reward model. Their steps are
`infer-0`, `teacher-0`, `reward-0`."""
FOLDERS = {INFER: "replicas", TEACHER: "teachers", REWARD: "reward_models"}
"""Kind of replicas -> folder of their files in that of the attempt."""
FIXED = {TEACHER: "teacher", REWARD: "reward model"}
"""Kinds of replicas with another model than the policy -> that model in words."""
NUMBER_OPTIONS = {INFER: "--replica", TEACHER: "--teacher", REWARD: "--reward"}
"""Kind of replicas -> option of `megatron_rl.replica_main` with the number of one."""
OF_REPLICAS = "-infer"  # suffix of names that belong to an image which only the inference replicas run in
TRACKERS = ("wandb", "mlflow", "trackio")
"""Trackers that show a run under an id, whose files a copy or fork of the run does not take over."""
CARRIED = "huggingface"
"""Folder in a converted checkpoint: config.json, the tokenizer, and the other files that came with the weights."""


class RunDir:
    """Paths of one run."""

    def __init__(self, root: AnyPath) -> None:
        self.root = Path(root)

        # Inputs
        self.recipe = self.root / "recipe.yaml"  # the recipe as the user gave it
        self.resolved = self.root / "resolved.yaml"
        """The recipe with every default written out. A directory with this file is a run directory."""
        self.identity = self.root / "run.json"  # RunIdentity
        self.changes = self.root / "changes.jsonl"  # RecipeChange, a line for each `--change` of a resumed run
        self.plan = self.root / "plan.json"  # PlanRecord
        self.script = self.root / "job.sbatch"  # the sbatch script of this run; submitting it again resumes the run
        self.code = self.root / "code"
        """Snapshot of the running code, first on the ranks' PYTHONPATH; a link to the newest one."""
        self.code_record = self.code / "SNAPSHOT.json"  # CodeSnapshot
        self.kept_files = self.root / "files"  # folder of copies of the user's code files
        self.kept_files_record = self.kept_files / "FILES.json"  # KeptFiles
        self.job = self.root / "job.json"  # Owner: the Slurm job that owns this run, or was the last to
        self.job_lock = self.root / ".job.lock"  # flock of the batch script that is running this run
        self.fork = self.root / "fork.json"  # Fork
        self.lock = self.root / ".lock"  # flock of the process that owns the run; its text is a LockOwner
        self.token = self.root / "token"
        """Token of the listeners of this run's ranks, one line. Readable by the run's owner only, and never put into an
        argument, a log or a script. Written by the host side before any rank starts."""
        self._name_results()

    def _name_results(self) -> None:
        self.attempts_ledger = self.root / "attempts.jsonl"
        """AttemptStart and AttemptEnd, a line for each start and end of an attempt."""
        self.notifications = self.root / "notifications.jsonl"  # Notification, one per event that was sent, or tried to
        self.done = self.root / "DONE"  # Done: exists if the run is finished
        self.metrics = self.root / "metrics.jsonl"  # MetricsLine, one per step
        self.metrics_index = self.root / "metrics_index.jsonl"  # IndexRow, one per some hundred steps
        self.lesson = self.root / "lesson.json"  # LessonRecord
        self.evaluations = self.root / "evaluations.jsonl"
        """MetricsLine, one per evaluation; step 0 is the model before training."""
        self.evaluation_request = self.root / "evaluation_request.json"
        """Evaluation that a job runs (`evaluate.config.Evaluation`); a run that trains has none."""
        self.evaluation = self.root / "evaluation.json"
        """EvaluationResult of a job that evaluates another run's checkpoint; the answers are in the same folder."""
        self.evaluation_results = self.root / "evaluations"
        """Folder of the results of `mrl evaluate` for this run: an EvaluationResult and its answers for each."""
        self.exports = self.root / "exports"  # folder of the exports that `mrl push` uploads
        self.report = self.root / "report.html"  # page of the run, written by `mrl report`
        self.bank = self.root / "rollouts" / "bank"  # folder of the answers that are generated and not yet trained on
        self.tensorboard = self.root / "tensorboard"
        self.event_files = self.root / "tensorboard.json"  # EventFilesState
        self.wandb_files = self.root / "wandb"
        """Folder of wandb's own files, a copy of the record from the newest attempt."""
        self.mlflow_store = self.root / "mlflow.db"
        """MLflow's store, if the run is given no other."""
        self.checkpoints = self.root / "checkpoints"
        self.latest_checkpoint = self.checkpoints / "latest"
        """Text file with the name of the newest published checkpoint."""

    @property
    def batch_log(self) -> Path:
        """Output of the batch script over all attempts. It is outside the run directory, because Slurm opens it before
        the job can create anything."""
        return self.root.with_name(self.root.name + ".log")

    def tracker(self, name: str) -> Path:
        """TrackerRun of a tracker, one of TRACKERS."""
        return self.root / f"{name}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def unfinished_checkpoint(self, step: int, save_id: str) -> Path:
        """Folder of a save until it is published; a `.tmp` whose processes have ended is debris."""
        return self.checkpoints / f"step-{step:06d}.{save_id}.tmp"

    def passed_over_checkpoint(self, step: int) -> Path:
        """Folder of a checkpoint that a start could not read, when a start has resumed from an earlier one."""
        return self.checkpoints / f"step-{step:06d}.passed-over"

    def passed_over_steps(self) -> list[int]:
        """Return the steps whose checkpoints were passed over. Raises OSError as `checkpoint_steps` does."""
        return _numbers(self.checkpoints, r"step-([0-9]{6,})\.passed-over")

    def checkpoint_steps(self) -> list[int]:
        """Return the steps with a published checkpoint, newest first, whether it is intact or not. Raises OSError if
        the folder cannot be listed."""
        return _numbers(self.checkpoints, r"step-([0-9]{6,})")[::-1]

    def attempt(self, number: int) -> Attempt:
        return Attempt(self, number)

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts, oldest first. Raises OSError if the folder cannot be listed."""
        return _numbers(self.root / "attempts", r"([0-9]+)")

    def last_attempt(self) -> int:
        """Return the number of the newest attempt; 0 before the first. Raises OSError as `attempt_numbers` does."""
        return max(self.attempt_numbers(), default=0)


def _numbers(folder: Path, pattern: str) -> list[int]:
    """Numbers of the names in a folder that match a pattern, ascending. Raises OSError."""
    found = (re.fullmatch(pattern, name) for name in names_in(folder))
    return sorted(int(match[1]) for match in found if match)


class RankFiles:
    """Paths of the ranks of one world: their state, and how they end."""

    def __init__(self, folder: Path, logs: Path, role: str) -> None:
        """role: step of the attempt, such as `train`; prefix of the names of its logs."""
        self.folder = folder
        self.logs = logs
        self.role = role
        self.drain = folder / "drain.json"  # Drain: exists if the ranks must stop at the next safe point
        self.outcome = folder / "outcome.json"  # Outcome
        self.progress = folder / "progress.json"  # Progress; replaced, never appended
        self.heartbeats = folder / "heartbeats"  # folder of `heartbeat_files`
        self.image = folder / "image"  # text file with the path of the container image of the attempt's steps
        self.hang = folder / "hang.json"  # Hang
        self.srun = folder / f"srun.{role}"  # messages of srun about the step itself, such as `node05: task 3: Killed`

    def address(self, name: str) -> Path:
        """Address of a listener of these ranks, such as `train` (their rendezvous)."""
        return self.folder / "addresses" / f"{name}.json"

    def error(self, rank: int) -> Path:
        return self.folder / f"error.{rank}.json"

    def errors(self) -> list[Path]:
        """Return the existing error files, lowest rank first. Raises OSError if the folder cannot be listed."""
        return [self.error(rank) for rank in _numbers(self.folder, r"error\.([0-9]+)\.json")]

    def stacks(self, rank: int) -> Path:
        """Stacks of all threads of a rank at each STACKS_SIGNAL."""
        return self.logs / f"{self.role}.{rank}.stacks"

    def log(self, rank: int, role: str | None = None) -> Path:
        """Output of one rank. role: that of another step."""
        return self.logs / f"{role or self.role}.{rank}.log"


class Attempt(RankFiles):
    """Paths of one attempt, which is one start of the ranks: those of the training ranks and of the attempt as a
    whole."""

    def __init__(self, run: RunDir, number: int) -> None:
        name = f"{number:03d}"
        super().__init__(run.root / "attempts" / name, run.root / "logs" / ("attempt-" + name), TRAIN)
        self.number = number
        self.latest_logs = run.root / "logs" / "latest"
        self.packages = self.folder / "packages"
        """Folder with a link to the ranks' code, for a Python of local replicas that lacks it."""
        self.requeued = self.folder / "requeued.json"  # Requeued
        self.kernels = self.folder / "kernels.json"  # Kernels
        self.replica_image = self.folder / f"image{OF_REPLICAS}"
        """`image` of the inference replicas, if they have another one."""
        self.nodes = self.folder / "nodes.json"  # NodeAssignment
        self.marks = self.folder / "marks.json"  # Marks
        self.profile = self.folder / "profile"  # folder of the traces that the recipe's section `profile` requests
        self.fabric = self.folder / "fabric.json"  # FabricReport
        self.timeline = self.folder / "timeline.jsonl"
        """TimelineLine, one per stretch of time. A line has the seconds of all ranks since the line before it; the
        first line has those since `began`."""
        self.rollouts = self.folder / "rollouts"
        """Folder of the groups that the ranks trained on: see `rollout_records`."""

    def health(self, host: str) -> Path:
        return self.folder / "health" / f"{host}.json"

    def unpacked(self, host: str, of: str = "") -> Path:
        """Empty file: a container image is unpacked on this node. of: OF_REPLICAS for that of the replicas."""
        return self.folder / f"unpacked{of}" / host

    def replica(self, number: int, kind: str = INFER) -> Replica:
        return Replica(self, number, kind)

    def replicas(self, kind: str = INFER) -> list[Replica]:
        """Return the paths of the started replicas of a kind, lowest number first. Raises OSError if the folder cannot
        be listed."""
        return [Replica(self, number, kind) for number in self.replica_numbers(kind)]

    def replica_numbers(self, kind: str = INFER) -> list[int]:
        """Return the numbers of `replicas`, without their paths: naming 1,000 of them takes longer than listing them.
        Raises OSError."""
        return _numbers(self.folder / FOLDERS[kind], r"([0-9]+)")


class Replica(RankFiles):
    """Paths of the ranks of one replica, a separate world. A restart of it in the same attempt writes the same files.
    It drains with the attempt."""

    def __init__(self, attempt: Attempt, number: int, kind: str = INFER) -> None:
        super().__init__(attempt.folder / FOLDERS[kind] / str(number), attempt.logs, f"{kind}-{number}")
        self.attempt = attempt
        self.number = number
        self.kind = kind
        self.drain = attempt.drain
        self.image = attempt.image
        self.state = self.folder / "state.json"  # ReplicaState
        self.listener = self.folder / "address.json"  # ReplicaAddress
