"""A package to submit as a job; see `task.py`."""
