"""The only lock, processes that leave nothing behind, signals that are remembered, output that may come to nothing."""
