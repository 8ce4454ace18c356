"""The record of a run: metric names, tallies, files, TensorBoard, Weights & Biases."""
