"""Policy losses: what a recipe chooses by `grpo.policy_loss`, one formula a file."""
