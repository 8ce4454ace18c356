"""GRPO on a Megatron model: the code that runs on GPUs. Never imports launcher."""
