"""One page of a run, or of several beside one another: data first (typed, pure), the page apart from it."""
