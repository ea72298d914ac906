"""What every part of Footplate may use: errors, randomness, signals, hooks, optional packages.

Nothing here imports another part of Footplate.
"""
