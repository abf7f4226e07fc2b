"""What comes with the images: the header of the series, its preview, and remarks on the data."""
