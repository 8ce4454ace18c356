"""Settings that must precede all imports of a test."""

import os

# Kernels in Triton run on the CPU. Triton reads this when it is imported, as torch may do at any time.
os.environ["TRITON_INTERPRET"] = "1"
