"""Streaming, overlap and collectives against the limits of the bus and the network."""
