"""Processes beside the ranks. Standard library only, Python 3.9 and later: bare batch hosts run them too.

This folder holds the entries (`python3 -m launcher.host.NAME`). A job runs the copy in RUN_DIR/code.
"""
