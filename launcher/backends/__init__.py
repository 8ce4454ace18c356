"""Where the launcher touches the world: processes of this machine, Slurm's commands as a user has them, probes."""
