"""Volumes of scanners and electron microscopes: NIfTI and MRC, also compressed with gzip."""
