"""Packing: documents of a table in sequences of a fixed length, with attention within documents."""
