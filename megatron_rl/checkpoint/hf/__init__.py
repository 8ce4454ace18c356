"""Weights in the format of Hugging Face: read by the ranks, converted to checkpoints and back."""
