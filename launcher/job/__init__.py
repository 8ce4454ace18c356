"""Making of a Slurm job from a recipe and its plan: draft, script, code, run directory, submission, fork."""
