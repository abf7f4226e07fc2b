"""From samples to images: one image, several times or coefficients at once, or a few coils at a time."""
