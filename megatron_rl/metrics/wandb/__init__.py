"""The record, told to Weights & Biases by a process of its own."""
