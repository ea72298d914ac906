"""Replay: the rows of a step, and parts of a run trained again, from what the checkpoints of the run hold.

recorded_run.py     the checkpoints of a run, and the history of its steps
step_rows.py        the rows of a step, named without having been logged
retraining.py       the program of a run, rebuilt to train again
replay.py           a step trained again, with its batch, loss and gradients
step_recorder.py    the callback that records the step
verify.py           a stretch trained again, and its states compared with the checkpoints
state_comparer.py   the callback that compares them
"""
