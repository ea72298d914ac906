"""Mixing: batches of several tables, by weights."""
