"""Training: batches, forward and backward passes, optimizer."""
