"""An inference replica of a run: ranks of a world of their own, which answer over HTTP with weights that the training
ranks send them."""
