"""Side effects of the launcher: processes of this machine, Slurm's commands, probes."""
