"""Do the nodes reach each other, and fast? The all-reduce before the ranks start."""
