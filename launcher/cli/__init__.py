"""The command lines. Each is a file that imports what it needs when it is called: people wait for these."""

import gc

# They make many objects once and hardly any garbage; collecting at the usual pace takes a tenth of a dry run.
gc.set_threshold(500_000)
