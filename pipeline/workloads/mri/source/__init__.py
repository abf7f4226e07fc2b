"""The images that a job makes of a raw file: their readouts, their grid, their inputs."""
