"""One attempt of a run on the batch host: owned, begun, watched, drained, closed, started again."""
