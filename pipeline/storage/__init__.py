"""Where bytes are: files by position, and partial, sealed and published outputs."""
