"""What clusters there are and which one a run goes to."""
