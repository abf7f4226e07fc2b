"""Gangs: one function on every rank at once."""
