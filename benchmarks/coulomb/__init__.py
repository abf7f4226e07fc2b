"""Potential maps, as kernels and as whole jobs."""
