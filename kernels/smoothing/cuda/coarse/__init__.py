"""Wide Gaussians on a coarse grid: decimation and interpolation along one axis (resample), or two at once (planes)."""
