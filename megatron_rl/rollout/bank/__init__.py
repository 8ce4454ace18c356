"""What generation has paid for outlives the process: recorded while it is made, on disk, and chosen from afterwards."""
