"""The runtime that all operations share: compiling and launching CUDA, compiled CPU bodies, threads, measuring."""

import os

# If colorama is installed, Numba's first error message replaces sys.stdout and sys.stderr.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
