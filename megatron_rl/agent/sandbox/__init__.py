"""Child processes with limits, for code that may hang, grow, crash or be hostile: workers that call a function of ours,
and programs that a model wrote, one process each."""
