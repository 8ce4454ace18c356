"""Probes of this machine or a node, each with a time limit: commands, disks, installed software."""
