"""The only place that knows which device this is, and what megatron-core needs patched for it."""
