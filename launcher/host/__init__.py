"""What runs beside the ranks. Standard library only, Python 3.6 and later: it also runs on bare batch hosts."""
