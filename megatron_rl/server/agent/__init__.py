"""An environment that runs in a process of its own and is asked by the ranks of a run: see agent/remote/agent_wire.py."""
