"""One device and what lies near it: memory, streams, the driver, discovery."""
