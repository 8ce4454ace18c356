"""Client of an agent in another process, and the protocol between the ranks and the agent."""
