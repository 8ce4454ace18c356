"""From what mrl-submit was asked for to a started run: on this machine, on Slurm, in an allocation; and watching it."""
