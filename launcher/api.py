"""mrl from Python: submit runs, read them, evaluate them, and end them. The commands call the same functions.

    from launcher.api import Run, submit

    run = submit("demo", "training.steps=50", cluster="local")
    run.wait()
    print(run.state, run.metrics()[-1]["mean_reward"])

Nothing here prints, asks or exits. What mrl refuses is a `BadInput`, and what fails a `Failed`, which is one too; each
has the text that the command prints. Slow imports are in the functions that need them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cluster.choice import LOCAL, load_clusters
from launcher.errors import BadInput, Failed, Unsure
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import GroupLine

if TYPE_CHECKING:
    import pandas

    from launcher.runs.replay import Replayed
    from launcher.runs.state import RunStatus, State
    from launcher.runs.submitit_job import LocalJobOfRun, SlurmJobOfRun
    from launcher.start.evaluation import EvaluationOptions
    from megatron_rl.contract.evaluation_records import EvaluationResult

__all__ = ["BadInput", "Failed", "GroupLine", "Run", "Unsure", "find", "submit"]

ASK_EVERY_S = 5.0
"""Seconds between two questions to Slurm while a run is waited for; its controller is shared by many users."""
LOOK_EVERY_S = 0.2
"""Seconds between two looks at the files of a local run."""

Steps = int | tuple[int, int]


class Run:
    """A run, which is its directory. Any number of these objects may exist, in any process."""

    def __init__(self, path: str | Path, notes: tuple[str, ...] = ()) -> None:
        """Open a run. Raises BadInput where `path` is not the directory of one.

        notes: remarks of its submission, which `mrl-submit` prints.
        """
        from launcher.runs.find import is_run

        if not is_run(str(path)):
            raise BadInput(f"{path}: not the directory of a run (it has no resolved.yaml); `find` takes names and ids")
        self.files = RunDir(Path(path).absolute())
        """Paths of its files."""
        self.notes = notes

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def path(self) -> Path:
        return self.files.root

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> RunStatus:
        """State with its reason, what the run waits for, its job, attempt and number of steps. Asks Slurm once."""
        from launcher.runs.state import read_statuses

        (status,) = read_statuses([self.files])
        return status

    @property
    def state(self) -> State:
        """One of new, queued, requeued, running, saving, finished, stopped, failed, cancelled, lost, unknown,
        unreadable and copy: see `mrl status --help`. Asks Slurm."""
        return self.status.state

    @property
    def job(self) -> SlurmJobOfRun | LocalJobOfRun:
        """Present job of the run, as a `Job` of submitit: `state`, `done()`, `stdout()`, `cancel()` and `results()`
        mean what they mean there. A run may have several jobs one after the other; the object follows them. Raises
        BadInput where the record of the job cannot be read."""
        from launcher.runs.submitit_job import job_of_run

        return job_of_run(self.files)

    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each step so far: {"step": 1, "mean_reward": 0.25, ...}. A value that a step does not have
        is absent. Raises Failed where the record cannot be read."""
        from launcher.runs.step_record import rows_of

        return rows_of(self.files.metrics)

    def metrics_frame(self) -> pandas.DataFrame:
        """Return `metrics` as a frame of pandas with the steps as index. Raises Failed without pandas, which mrl does
        not install."""
        try:
            import pandas
        except ImportError as error:
            raise Failed(f"metrics_frame needs pandas: {error}; metrics() returns the same rows without it") from error
        rows = self.metrics()
        return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    def evaluations(self) -> list[dict[str, Any]]:
        """Return a row for each evaluation of the training run, as `metrics` does."""
        from launcher.runs.step_record import rows_of

        return rows_of(self.files.evaluations)

    def rollouts(self, step: Steps | None = None, **conditions: Any) -> list[GroupLine]:
        """Return recorded groups: a prompt, and the answers to it with rewards; of sampled groups with their tokens.

        Args:
            step: a step, or the first and the last one; default: the newest with sampled groups.
            conditions: environment, problem, signal, reward (from, to) and reason, as options of `mrl rollouts`.

        Raises Failed where the run has no such steps.
        """
        from launcher.runs.rollout_selection import Wanted, recorded_groups, selected

        steps = (step, step) if isinstance(step, int) else step
        return [group for group, _ in selected(recorded_groups(self.files, steps), Wanted(**conditions))]

    def log(self, role: str | None = None, rank: int = 0, attempt: int | None = None, lines: int = 100) -> list[str]:
        """Return the last lines of a log, as `mrl logs` does: of the newest attempt, and of the training ranks or,
        until they have one, of the batch script. Raises BadInput for a log that does not exist, Failed where it does
        not yet."""
        from launcher.runs.logs import LogFollower, refuse_absent_attempt

        refuse_absent_attempt(self.files, attempt)
        log = LogFollower(self.files, role, rank, attempt, lines)
        found = [line.line for line in log.new_lines()]
        if not found:
            log.refuse_missing()
        return found

    def wait(self, timeout_s: float | None = None) -> State:
        """Wait until the run has ended, through every requeue, and return its state. Interrupting the wait does not
        affect the run. timeout_s: seconds; None: no limit. Raises TimeoutError."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.status).alive:
            left_s = float("inf") if give_up is None else give_up - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.path} is {status.state} after {timeout_s:g} s")
            time.sleep(min(left_s, ASK_EVERY_S if status.job else LOOK_EVERY_S))
        return status.state

    def cancel(self, drain: bool = True) -> str:
        """End the run, and return what was done. drain: save first; the run then ends as stopped. Raises Failed where
        it is unknown whether the run is alive, BadInput for a copy of another run's directory."""
        from launcher.runs.control import cancel, target_of

        status = target_of(str(self.path)).status
        return cancel(status, drain) if status.alive else f"already ended: {status.state}"

    def resume(
        self, *overrides: str, cluster: str | None = None, update_code: bool = False, trust: bool = False
    ) -> Run:
        """Start the run again from its newest checkpoint, as `mrl resume` does, and return it. overrides: changes such
        as `training.steps=1200`. Raises BadInput, for example where it is alive."""
        from launcher.start.quiet import start_quietly
        from launcher.start.request import resumption

        return Run(*start_quietly(resumption(self.files, overrides, cluster, update_code=update_code, trust=trust)))

    def replay(self, step: int, prompt: str | int, **options: Any) -> Replayed:
        """Answer a recorded prompt again with the random numbers of its step, and score the recorded answers by today's
        code.

        Args:
            prompt: its ordinal, or the digest of its problem.
            options: checkpoint (a step), sample, device and trust, as of `launcher.runs.replay.replay`.

        Raises BadInput where the prompt or the checkpoint is missing, Failed where the process fails.
        """
        from launcher.runs.replay import replay

        return replay(self.files, step, str(prompt), **options)

    def evaluate(self, report: Callable[[Mapping[str, Any]], None] | None = None, **options: Any) -> EvaluationResult:
        """Score the newest checkpoint in a process here, and return the result, which is also written to a file.

        Args:
            report: called with the progress, a mapping with the keys set, mode, done, of and waits_for.
            options: those of `mrl evaluate`, such as k=8, env="gsm8k" or sets=["held_out"].

        Raises BadInput where an option cannot be used, Failed where the evaluation fails, and KeyboardInterrupt after
        Ctrl-C; answers so far are kept, and the same call continues. Call it in the main thread, which gets signals.
        """
        from launcher.backends.child import ChildInterrupted, evaluate
        from launcher.start.evaluation import evaluation_here

        asked = evaluation_here(str(self.path), _evaluation_options(options))
        try:
            result, _ = evaluate(asked, report or (lambda _: None))
        except ChildInterrupted:
            raise KeyboardInterrupt from None
        return result

    def submit_evaluation(self, cluster: str, run_dir: str | Path | None = None, **options: Any) -> Run:
        """Submit a job that scores the newest checkpoint, and return its run, whose `job.result()` is the result.
        options: as of `evaluate`. Raises BadInput."""
        from launcher.start.evaluation import evaluation_job
        from launcher.start.quiet import submit_quietly
        from launcher.start.request import Request

        clusters, folder = load_clusters(), _path(run_dir)
        name = clusters.choose(cluster, None)
        if name == LOCAL:
            raise BadInput("submit_evaluation needs a Slurm cluster; evaluate() scores the checkpoint here")
        planned = evaluation_job(str(self.path), _evaluation_options(options), clusters, name, folder)
        request = Request(recipe=planned.recipe.asked, run_dir=folder, cluster=name)
        return Run(*submit_quietly(planned, request, clusters.profile(name), ()))


def find(name: str | None = None) -> Run:
    """Return the run of a name, the beginning of one, a path or a job id; None: the newest of this account. Raises
    BadInput unless there is one."""
    from launcher.runs.find import find as found

    return Run(found(name).root)


def submit(
    recipe: str | Path,
    *overrides: str,
    cluster: str | None = None,
    run_dir: str | Path | None = None,
    change: bool = False,
    trust: bool = False,
    after: tuple[str, ...] = (),
) -> Run:
    """Submit a run to a Slurm cluster, or start it on this machine, where it outlives this process. Returns once it is
    submitted or has started; with the directory of a run it resumes that run.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: values of the recipe, such as `grpo.group_size=8`. For a sweep, call `submit` in a loop.
        cluster: default: as of `mrl-submit`.
        run_dir: default: a new directory, NAME-DATE-TIME, in ./runs or in the cluster's run_root.
        change: whether a run that has begun may get other values.
        trust: whether to accept a directory of another user.
        after: job ids or runs that must have ended before this one starts.

    Raises:
        BadInput: the recipe, a value, the directory, the data or the cluster cannot be used; nothing was changed.
        Unsure: Slurm did not say whether it accepted the job; the directory stays.
        Failed: the run did not start on this machine.
    """
    from launcher.start.quiet import start_quietly
    from launcher.start.request import Request

    request = Request(
        recipe=str(recipe),
        overrides=overrides,
        cluster=cluster,
        run_dir=_path(run_dir),
        change=change,
        trust=trust,
        after=tuple(map(str, after)),
    )
    return Run(*start_quietly(request))


def _evaluation_options(options: Mapping[str, Any]) -> EvaluationOptions:
    from launcher.start.evaluation import EvaluationOptions

    known = EvaluationOptions.__slots__
    if unknown := [name for name in options if name not in known]:
        close = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(known)}"
        raise BadInput(f"evaluate: {unknown[0]}: unknown option; {hint}")
    return EvaluationOptions(**{**options, "out": _path(options.get("out"))})


def _path(given: str | Path | None) -> Path | None:
    if given is not None and not str(given):
        raise BadInput("the path is empty; a run needs its own directory")
    return None if given is None else Path(given)
