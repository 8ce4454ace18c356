"""Commands of mrl and mrl-submit. Each is a file that imports what it needs when it is called, since people wait for
it."""

import gc

# Commands create many objects and little garbage; collecting at the default rate takes a tenth of a dry run.
gc.set_threshold(500_000)
