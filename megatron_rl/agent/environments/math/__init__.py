"""Mathematics: problems of a data set, with answers compared by value."""
