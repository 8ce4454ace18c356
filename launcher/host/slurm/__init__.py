"""The only client of Slurm's commands."""
