"""mrl-submit without its sbatch: makes the run directory and writes the path of its script, which tests submit or start
themselves. Images and weights may be missing.

    python prepared_run.py RECIPE OVERRIDE... --cluster NAME --run-dir DIR
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def prepared(words: list[str], environ: Mapping[str, str], folder: Path) -> Path:
    """Script of a run that is made with these words, in this environment and current directory."""
    command = [sys.executable, __file__, *words]
    return Path(subprocess.check_output(command, env=dict(environ), cwd=folder, text=True).strip())


def _main() -> None:
    from launcher.cli.mrl_submit import main as mrl_submit
    from launcher.cluster.choice import load_clusters
    from launcher.job.draft import draft, in_directory
    from launcher.job.run_directory import opened
    from launcher.job.submit import write_files
    from launcher.start.request import Request, plan_runs

    request = Request(**mrl_submit.make_context("mrl-submit", sys.argv[1:]).params)
    clusters = load_clusters()
    cluster, (planned,) = plan_runs(request, clusters)
    assert planned.given is not None
    root = planned.given.absolute()
    job = in_directory(draft(planned.recipe, cluster, clusters.profile(cluster), root).job, root)
    with opened(job.recipe, root, change=False) as found:
        write_files(found.run, job, update_code=False)
    sys.stdout.write(str(found.run.script))


if __name__ == "__main__":
    _main()
