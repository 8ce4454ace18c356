"""vLLM as the engine of replicas: a process that starts `vllm serve`, and a plugin that gives it the run's weights.

Nothing here imports megatron-core, which vLLM's environment does not have; only the plugin imports vLLM.
"""
