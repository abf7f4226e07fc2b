"""Machine code that reads, decodes, encodes and writes many blocks or files in one call, without the GIL.

Imported only to read or write: the first call loads LLVM, and Numba if the loop has not been compiled before.
"""
