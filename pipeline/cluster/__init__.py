"""Many devices at work on one job: segments of its chunks over Dask workers."""
