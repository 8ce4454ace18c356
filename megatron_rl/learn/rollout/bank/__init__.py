"""The durable bank: generated work is recorded on disk, and a later attempt reuses it."""
