"""Machine code that reads, decodes, encodes and writes many blocks or files in one call, without the GIL.

Imported only to read or write: it needs Numba, which takes long to import.
"""
