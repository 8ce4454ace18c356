"""Competition mathematics: problems of a data set, answers checked by math-verify."""
