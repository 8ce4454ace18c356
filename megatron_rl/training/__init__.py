"""What trains: batches, forward and backward, optimizer."""
