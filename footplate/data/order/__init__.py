"""The order of rows, as pure functions: which rows, in which order, for which rank."""
