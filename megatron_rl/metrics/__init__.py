"""The record of a run: names, tallies, lines, TensorBoard, Weights & Biases."""
