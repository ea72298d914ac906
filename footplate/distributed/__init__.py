"""Training of one model in several processes: ranks, communication, agreement, and strategies."""
