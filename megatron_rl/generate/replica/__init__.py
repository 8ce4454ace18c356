"""An inference replica of a run: ranks of a separate world, which answer over HTTP with weights that the training
ranks send them."""
