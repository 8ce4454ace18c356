"""What `mrl chat`, `mrl rows` and `mrl environments try` run in a process beside the command line."""
