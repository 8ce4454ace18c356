"""What makes experience of a model: trajectories, agents, the keys of what they draw, environments by name."""
