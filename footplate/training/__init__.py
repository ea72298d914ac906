"""The trainer: its settings and parts, its loops, its reports, and the end of a run."""
