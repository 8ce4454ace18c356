"""From the trainer's weights to the engine's: an engine learns of a policy version here and nowhere else."""
