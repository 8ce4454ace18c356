"""Running what may hang, grow, die or be hostile, in child processes with limits: workers that answer again and again
by a function of ours, and programs that a model wrote, one process each."""
