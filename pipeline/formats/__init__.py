"""File formats, one folder for each kind of content."""
