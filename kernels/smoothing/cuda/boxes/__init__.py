"""Boxes of integers (running; sweep: both axes at once) and of floats (streamed; runs: past 255; tree: both axes)."""
