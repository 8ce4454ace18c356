"""What runs beside the ranks. Standard library only, Python 3.6 and later: it also runs on bare batch hosts.

This folder holds the entries (`python3 -m launcher.host.NAME`); a copy of it in RUN_DIR/code is what a job runs.
"""
