"""Records in the run directory for all attempts, in the user's index of runs, and in the caches.

Times are Unix seconds by the writer's clock, durations are seconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_rl.contract.shapes import record


@record()
class RunIdentity(NamedTuple):
    """run.json: identity of the run in a directory. Written when the directory is created, by mrl-submit or the first
    job, and again for a copy that is started; read by all commands that act on the run or its job."""

    id: str  # also in the comment of the run's jobs
    path: str  # absolute path of the directory at the time of writing
    inode: int  # of the directory
    at: float
    by: str = ""  # user


@record()
class Owner(NamedTuple):
    """job.json: the Slurm job that owns the run, or was the last to; absent in a local run. Written by mrl-submit, and
    by the batch host for a job submitted by plain sbatch and for a successor. Read by both, to refuse a second job."""

    job_id: str
    cluster: str  # name of the profile
    submitted_at: float
    by: str = ""  # user
    slurm_cluster: str | None = None  # Slurm's own name: the same id in another Slurm is another job
    succeeds: str | None = None  # id of the job that this one replaces
    run_id: str = ""  # RunIdentity.id
    name: str = ""  # of the job


# Placeholders in options of the container, for `mrl attach`
IMAGE = "{image}"  # path of the container image (Attempt.image)
CONTAINER = "{container}"  # name of the unpacked image on each node (container_name), and the mode of entering it
CODE = "{code}"  # path of the snapshot of the code


def container_name(job_id: str, attempt: str, of: str = "") -> str:
    """Return the name of an attempt's container on its nodes, which no earlier, killed attempt has used.

    of: paths.OF_REPLICAS for the container of replicas that have another image.
    """
    return f"mrl-{job_id}-{attempt}{of}"


@record(keys={"source": "from"})
class Fork(NamedTuple):
    """fork.json: the run and checkpoint that this run was forked from. Written by `mrl fork`; read for W&B, and by the
    ranks if the original was trained on other problems."""

    source: str  # run directory, absolute
    step: int
    changes: dict[str, list[Any]]  # key of the recipe -> [value there, value here]
    at: float
    by: str = ""


@record()
class TrackerRun(NamedTuple):
    """wandb.json, mlflow.json, trackio.json: the run of a tracker that shows this one. Written and read by
    metrics.trackers.upload of one attempt after the other. Not in a checkpoint: a fork begins as one and has its
    own."""

    id: str
    url: str | None = None  # None: the tracker does not have it yet
    evaluated: int | None = None  # step of the newest evaluation that it has; None: an earlier version did not note it


@record()
class EventFilesState(NamedTuple):
    """tensorboard.json: how far the event files of TensorBoard are. Written and read by rank 0 of one attempt after
    the other."""

    newest: int  # newest step in them, which may still lack its evaluation
    evaluated: int | None = None  # as in TrackerRun


@record()
class Done(NamedTuple):
    """DONE: the run is finished, and nothing starts it again. Written by the host side, checked before every start."""

    attempt: int
    step: int | None
    at: float


@record(version=None)
class Notification(NamedTuple):
    """A line of notifications.jsonl: an event that the user is notified of, at most once. Written by the host side just
    before it sends, and read by it at each start."""

    event: str  # key of the recipe's notify.on
    key: str  # the same for each repetition of the event
    text: str
    attempt: int
    at: float


@record()
class RecipeChange(NamedTuple):
    """A line of changes.jsonl: one `--change` of a resumed run. Written by mrl-submit; read by people, and by the host
    side to detect a newer one."""

    attempt: int  # first attempt with the change
    changes: dict[str, list[Any]]  # key of the recipe -> [old value, new value]
    at: float
    by: str = ""


@record()
class Submission(NamedTuple):
    """A line of the user's index of runs. Written by mrl-submit, and by the batch host for a successor; read by `mrl`
    to find a run by its name or job."""

    run_dir: str  # absolute
    cluster: str
    at: float
    job_id: str | None = None  # None: a local run


@record()
class LockOwner(NamedTuple):
    """Text of the lock file: the holder of the run. The holder writes it in place, because a locked file must not be
    replaced; a reader may find it half written."""

    what: str  # description of the process, for people
    pid: int
    host: str
    since: str  # local time


@record(version=None)
class CodeSource(NamedTuple):
    """Origin of a part of the snapshot. Before the snapshot is taken only the first five fields are known."""

    path: str
    name: str  # of its folder in the snapshot
    kind: str  # package, metadata, git, directory
    commit: str | None = None
    dirty: bool = False
    untracked: list[str] = []  # files unknown to git
    files: int = 0
    bytes: int = 0
    notes: list[str] = []  # omitted files, and why


@record()
class CodeSnapshot(NamedTuple):
    """code/SNAPSHOT.json: the origin of the running code. Written last, by mrl-submit; read by the batch host,
    `mrl attach` and the next submission."""

    snapshot: int  # number, from 1
    at: float
    sources: list[CodeSource]
    pythonpath: list[str]  # folders of the snapshot


@record(version=None)
class KeptFile(NamedTuple):
    """A file of the user's code, such as the reward file of the environment `python`."""

    path: str  # its path when the run began
    name: str  # of the copy, below files/
    sha256: str
    beside: dict[str, str] = {}  # sha256 by name of the modules beside it that it imports, whose copies are beside its


@record()
class KeptFiles(NamedTuple):
    """files/FILES.json: the run's copies of the user's code files. Written by mrl-submit once, after the copies; read
    by the ranks, which run the copies."""

    files: list[KeptFile]


@record(version=None)
class RightAnswer(NamedTuple):
    """The right answer to a problem, by its data, and what the run's reward gives for it."""

    prompt: str  # its first SHOWN characters
    answer: str  # its first SHOWN characters
    reward: float | None  # its accuracy (`environment.accuracy`), by default the reward; None: the answer was lost
    why: str = ""  # reason of a lost answer


@record(version=None)
class PromptCounts(NamedTuple):
    """Counts over the first prompts of a run, or over its first rows of data."""

    prompts: int
    distinct: int  # different texts among them
    empty: int  # prompts that say nothing beyond what all of them share; 0 if all are equal
    longest: int  # characters of the longest one, less those that all share
    at_longest: int  # different prompts of that length
    lengths: int  # different lengths
    at_another: int  # different prompts of the commonest other length


@record()
class LessonRecord(NamedTuple):
    """Written once, by rank 0 of the first attempt; kept when the run resumes. Absent in runs of an older mrl."""

    prompts: PromptCounts
    right: list[RightAnswer] = []  # of the first problems; empty if the data has no right answers


SHOWN = 400


@record()
class CachedImage(NamedTuple):
    """NAME.CODE.json in the cache of images: the file of an image reference. Written by the import, on any node; read
    by the next import and by prefetch."""

    reference: str
    file: str  # name in the same folder
    at: float
    digest: str | None = None  # None: unknown to the registry


@record()
class CachedRepository(NamedTuple):
    """Record of a completely fetched repository of the hub. Written by launcher.fetch.hub, read by prefetch."""

    commit: str
    path: str  # of the snapshot, relative to the cache's folder
    at: float


@record()
class IndexRow(NamedTuple):
    """Row of metrics_index.jsonl: what the lines of metrics.jsonl up to one of them say. Written by rank 0; read by it
    when it resumes, by the host side and by the views."""

    step: int  # of that line
    end: int  # where it ends in metrics.jsonl, in bytes
    rewards: str  # mean rewards of the lines since the previous row: fp64, little-endian, as base64
    best: list[float] = []  # mean, standard error and step, as in `learning.Recent`; empty: none yet
    varied: bool = False  # as in `learning.Recent`
    since: dict[str, int] = {}  # warning that holds -> its first step
    save_s: float | None = None  # seconds of the newest save
