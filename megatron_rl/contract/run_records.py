"""What stands in the run directory for all its attempts, in the user's index of runs and in the caches.

Times are unix seconds by the writer's clock, durations seconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_rl.contract.shapes import record


@record()
class RunIdentity(NamedTuple):
    """run.json: which run a directory is. Written by whoever makes the directory, mrl-submit or the first job, and
    anew for a copy that is started; read by all that act on the run or on its job."""

    id: str  # as in the comment of the run's jobs
    path: str  # absolute, by which the directory was known when this was written
    inode: int  # of the directory
    at: float
    by: str = ""  # user


@record()
class Owner(NamedTuple):
    """job.json: the Slurm job that owns the run, or was the last to; a local run has none. Written by mrl-submit, and
    by the batch host for a job submitted by plain sbatch and for a successor. Read by both, to refuse a second one."""

    job_id: str
    cluster: str  # name of the profile
    submitted_at: float
    by: str = ""  # user
    slurm_cluster: str | None = None  # Slurm's own name: the same id in another Slurm is another job
    succeeds: str | None = None  # id of the job that submitted this one in its place
    run_id: str = ""  # RunIdentity.id
    name: str = ""  # of the job


# In the argv of a step, what only an attempt knows
IMAGE = "{image}"  # path of the container image (Attempt.image)
CONTAINER = "{container}"  # name of the unpacked image on each node (container_name) and how a step enters it
CODE = "{code}"  # the snapshot of the code, by its own name
HOSTS = "{hosts}"  # of the step (NodeAssignment), joined by commas
NODES = "{nodes}"  # their number
TASKS = "{tasks}"  # ranks of the step
LOGS = "{logs}"  # folder of the attempt's logs
ATTEMPT = "{attempt}"  # its number


def container_name(job_id: str, attempt: str) -> str:
    """What the container of an attempt is called on its nodes, where it has a name. An attempt never finds one that an
    earlier one was killed over."""
    return f"mrl-{job_id}-{attempt}"


@record(version=None, rest="rest")
class PlanStep(NamedTuple):
    """What one srun starts. Its argv: srun, `srun`, the plan's `container`, `command`. A word that is a placeholder,
    and an option whose value begins with one, is completed by the attempt."""

    name: str  # train, infer-0, ...
    nodes: list[int]  # indices into the plan's nodes
    tasks_per_node: int
    srun: list[str] = []  # options
    command: list[str] = []  # of each rank
    rest: dict[str, Any] = {}


@record(version=None, rest="rest")
class SmallerPlan(NamedTuple):
    """In what the plan for fewer nodes of a range `job.nodes` may differ."""

    nodes: int
    steps: list[PlanStep]
    rest: dict[str, Any] = {}


@record(version=None, rest="rest")
class CheckpointPlan(NamedTuple):
    """What a checkpoint takes."""

    seconds: float | None = None  # to write one; None: the profile does not say how fast the file system is
    rest: dict[str, Any] = {}  # sizes in bytes


@record(rest="rest")
class PlanRecord(NamedTuple):
    """plan.json: who does what. Written by mrl-submit, or by the first attempt from what its script carries; read by
    the batch host, `mrl attach`, `mrl status` and rank 0. What only people and `mrl plan` read is in `rest`."""

    nodes: int  # without the spare ones
    gpus_per_node: int
    spare_nodes: int
    steps: list[PlanStep]
    alternatives: list[SmallerPlan] = []  # the largest first
    checkpoint: CheckpointPlan = CheckpointPlan()
    container: list[str] = []  # options of pyxis for each step; empty: no container
    environment: dict[str, str] = {}  # what the script exports for everything that it starts
    rank_environment: dict[str, str] = {}  # what only the ranks have, set inside the container
    rest: dict[str, Any] = {}


@record(keys={"source": "from"})
class Fork(NamedTuple):
    """fork.json: the run and checkpoint that this one began as. Written by `mrl fork`, read for W&B, and by the ranks
    where that one was trained on other problems."""

    source: str  # run directory, absolute
    step: int
    changes: dict[str, list[Any]]  # key of the recipe -> [value there, value here]
    at: float
    by: str = ""


@record()
class WandbRun(NamedTuple):
    """wandb.json: the W&B run that shows this one. Written and read by metrics.wandb.upload of one attempt after the
    other. Not in a checkpoint: a fork begins as one and has its own."""

    id: str
    url: str | None = None  # None: W&B has not heard of it yet


@record()
class Done(NamedTuple):
    """DONE: the run is finished, and nothing starts it again. Written by the host side, looked for by whoever starts
    something."""

    attempt: int
    step: int | None
    at: float


@record()
class RecipeChange(NamedTuple):
    """A line of changes.jsonl: one `--change` of a resumed run. Written by mrl-submit; read by people, and that there
    is a newer one by the host side."""

    attempt: int  # the first that has it
    changes: dict[str, list[Any]]  # key of the recipe -> [old value, new value]
    at: float
    by: str = ""


@record()
class Submission(NamedTuple):
    """A line of the user's index of runs. Written by mrl-submit and by the batch host for a successor, read by `mrl` to
    find a run by its name or job."""

    run_dir: str  # absolute
    cluster: str
    at: float
    job_id: str | None = None  # None: a local run


@record()
class LockOwner(NamedTuple):
    """The text of the lock file: who holds the run. Written by the holder in place, for the file that is locked must
    stay the same one; read, perhaps half written, by whoever finds the run in use."""

    what: str  # in words
    pid: int
    host: str
    since: str  # local time


@record(version=None)
class CodeSource(NamedTuple):
    """Where a part of the snapshot came from. Until the snapshot is taken only the first five are known."""

    path: str
    name: str  # of its folder in the snapshot
    kind: str  # package, metadata, git, directory
    commit: str | None = None
    dirty: bool = False
    diff: str | None = None  # file beside the folder with the uncommitted changes
    untracked: list[str] = []  # files that git did not know
    files: int = 0
    bytes: int = 0
    notes: list[str] = []  # what was left out, and why


@record()
class CodeSnapshot(NamedTuple):
    """code/SNAPSHOT.json: where the code that runs came from. Written last, by mrl-submit or the first attempt; read by
    the batch host, `mrl attach` and the next submission."""

    snapshot: int  # number, from 1
    at: float
    sources: list[CodeSource]
    pythonpath: list[str]  # folders of the snapshot


@record(version=None)
class KeptFile(NamedTuple):
    """A file of the user's code, as the environment `python` runs one."""

    path: str  # where it was when the run began
    name: str  # of the copy, below files/
    sha256: str


@record()
class KeptFiles(NamedTuple):
    """files/FILES.json: the run's copies of files of the user's code. Written by mrl-submit, once and after the copies;
    read by the ranks, which run the copies."""

    files: list[KeptFile]


@record()
class CachedImage(NamedTuple):
    """NAME.CODE.json in the cache of images: which file an image reference stands for. Written by the import, on any
    node; read by the next one and by prefetch."""

    reference: str
    file: str  # name in the same folder
    at: float
    digest: str | None = None  # None: the registry did not say


@record()
class CachedRepository(NamedTuple):
    """The record of a repository of the hub that was fetched as a whole. Written by launcher.fetch.hub, read by
    prefetch."""

    commit: str
    path: str  # of the snapshot, from the cache's folder on
    at: float
