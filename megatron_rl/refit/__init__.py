"""From the trainer's weights to those of an engine, in its ranks or in a server: a run's engine learns of a policy
version here and nowhere else."""
