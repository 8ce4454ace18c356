"""Functions of the user's that score answers, each in its own process."""
