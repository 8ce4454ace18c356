"""Upload of the record to Weights & Biases by a separate process."""
