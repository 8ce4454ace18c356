"""The only lock, child processes and their end, signals as a queue, output to a disk that may be full."""
