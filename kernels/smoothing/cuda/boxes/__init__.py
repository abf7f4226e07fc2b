"""Boxes of integers (running; sweep) and of floats (tree, run_plane: both axes at once; streamed; runs: past 64)."""
