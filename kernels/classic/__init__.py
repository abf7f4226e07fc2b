"""The classic parallel operations, each in a folder of its own."""
