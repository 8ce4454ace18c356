"""What will happen to a recipe on a cluster, before it is submitted. Pure: facts in, findings out."""
