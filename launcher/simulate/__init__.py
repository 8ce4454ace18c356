"""How long the steps of a run take on each split of its nodes, by a simulation of its events. `measured` reads a
run, all else is pure."""
