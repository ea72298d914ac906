"""Replay: the rows of a step, and a step trained again, from what the checkpoints of a run hold.

    recorded_run.py    the checkpoints of a run, and the history of its steps
    rows.py            the rows of a step, named without having been logged
    replay.py          a step of a run trained again, with its batch, loss and gradients
    step_recorder.py   the callback that records the step
"""
