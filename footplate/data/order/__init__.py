"""The order of rows and their selection, as pure functions of numbers, seeds and hashes."""
