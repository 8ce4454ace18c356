"""Devices: the only room that knows which device a rank uses, and patches of megatron-core for it."""
