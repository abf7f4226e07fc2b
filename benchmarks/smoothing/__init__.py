"""Smoothing against its rivals."""
