"""Mapping: columns that a user's function computes from the rows of a table, such as tokens, kept on a local disk."""
