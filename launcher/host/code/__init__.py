"""The code that a run takes along: a snapshot, what belongs in it, and what git says of it."""
