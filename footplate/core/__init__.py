"""Basics for every part of Footplate: errors, randomness, signals, hooks, optional packages.

Nothing here imports another part of Footplate.
"""
