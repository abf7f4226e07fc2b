"""What every operation runs on: compiling and launching CUDA, compiled CPU bodies, threads, and measuring."""
