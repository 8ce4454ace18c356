"""A run at its true size without a node: one rank of every kind, on tensors that have a shape, a type and a device and
no numbers."""
