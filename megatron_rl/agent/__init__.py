"""Experience of a model: trajectories, agents, the random keys of rollouts, and environments by name."""
