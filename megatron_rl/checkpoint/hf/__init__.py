"""Weights in Hugging Face's format: read by the ranks, and written from checkpoints."""
