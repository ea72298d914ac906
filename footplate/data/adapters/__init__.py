"""Loaders of other libraries, made resumable. `adapt.py` chooses the adapter."""
