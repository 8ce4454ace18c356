"""The policy endpoint: OpenAI's API for agent programs, whose calls become the trajectories of a rollout."""
