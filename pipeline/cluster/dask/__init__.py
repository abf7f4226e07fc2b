"""Everything that talks to Dask."""
