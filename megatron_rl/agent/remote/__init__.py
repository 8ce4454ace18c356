"""An agent in another process, as the ranks that train see it: what both say, and who asks it."""
