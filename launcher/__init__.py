"""The side that runs on the login node, and beside the ranks on a job's nodes (`host`). Never imports torch."""
