"""Non-uniform Fourier transforms and MRI reconstruction against other programs."""
