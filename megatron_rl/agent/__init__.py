"""What makes experience of a model: trajectories, agents, environments by name."""
