"""Prompts in, tokens out: engines in this process and in others, and the weights on their way to them."""
