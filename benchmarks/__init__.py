"""Measurements of Millrace beside its rivals."""
