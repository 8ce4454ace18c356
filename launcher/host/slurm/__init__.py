"""The only client of Slurm's commands: the bounded call, questions, orders, and what the commands print.

call     one command, within a time limit, in a form that no setting of the user's changes
queries  questions about jobs, nodes and the cluster; nothing changes by them
orders   signal, cancel, requeue, submit
formats  pure: what the commands print and take: fields, times, host lists, states
"""
