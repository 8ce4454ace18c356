"""Architectures of published models, one row each: keys of config.json and names of tensors."""
