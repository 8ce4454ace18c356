"""The policy: megatron-core's GPTModel on packed tokens, its layers, attention and tokenizer."""
