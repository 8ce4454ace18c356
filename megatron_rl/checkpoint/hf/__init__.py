"""Weights in Hugging Face's format: read by the ranks, converted to checkpoints and back."""
