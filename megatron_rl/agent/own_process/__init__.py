"""Functions of the user's that score answers, each in a process of its own."""
