"""What runs beside the ranks. Standard library only, Python 3.9 and later: bare batch hosts run it too.

This folder holds the entries (`python3 -m launcher.host.NAME`); a copy of it in RUN_DIR/code is what a job runs.
"""
