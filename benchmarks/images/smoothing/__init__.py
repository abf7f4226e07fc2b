"""Smoothing benchmarks against other libraries."""
