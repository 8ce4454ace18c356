"""Steps from a recipe and its plan to a Slurm job: draft, script, code, run directory, submission, fork."""
