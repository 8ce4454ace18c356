"""An evaluation: a policy answers problems k times each, outside a run, and can be interrupted at any moment."""
