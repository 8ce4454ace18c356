"""An environment that runs in a separate process and is asked by the ranks of a run: see agent/remote/agent_wire.py."""
