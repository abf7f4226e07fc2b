"""Filters of images against other libraries."""
