"""Benchmarks of Millrace against other libraries."""
