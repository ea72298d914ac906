"""Loaders of other libraries, made resumable."""
