"""What every other part may use, and what knows none of them: errors, randomness, signals, hooks, optional packages."""
