"""Local storage: positional file access, output locks, and partial, sealed and published outputs."""
