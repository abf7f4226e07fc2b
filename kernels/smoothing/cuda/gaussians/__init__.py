"""Gaussians along both axes at once: along strips of rows (wide), and as products on tensor cores (tensor, words)."""
