"""What generation has paid for outlives the process."""
