"""Looks at this machine or a node, each look bounded in time: commands, disks, installed software."""
