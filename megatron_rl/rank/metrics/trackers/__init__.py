"""Trackers that show the record of a run: TensorBoard, Weights & Biases, MLflow and trackio, behind one interface."""
