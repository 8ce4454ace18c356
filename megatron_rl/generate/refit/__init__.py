"""Refit: gives the trainer's weights to the engine, in the same ranks, in replicas or in a server."""
