"""Pure: who does what on which GPU, and whether it fits."""
