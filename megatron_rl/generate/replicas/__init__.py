"""Inference replicas, which are other processes, as one engine: the protocol, the choice of a replica for each request,
and the recovery of requests whose replica dies."""
