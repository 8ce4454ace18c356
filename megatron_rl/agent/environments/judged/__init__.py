"""Answers that another model scores: by a prompt, by a rubric, against one another, or as a sequence classifier."""
