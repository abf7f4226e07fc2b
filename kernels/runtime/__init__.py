"""The runtime that all operations share: compiling and launching CUDA, compiled CPU bodies, threads, measuring."""
