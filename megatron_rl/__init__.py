"""What runs where the GPUs are: GRPO on a Megatron model. Never imports launcher."""
