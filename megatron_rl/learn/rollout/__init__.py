"""Rollouts: the driver turns prompts of the stream into scored groups, and ranks exchange these for training; also
evaluation, and the bank of generated work."""
