"""What slows a training down, from measured times to advice.

core/time_split.py          the loop lets time count as input, step, checkpoint, …
step/phase_times.py         now and then, one step is timed by its phases
step/examined_step.py       a few steps of a run are examined: operations, FLOPs, reads of device values, pauses
step/xla/runtime/           a compiled step lets time count as dispatch, transfer, compilation
distributed/                strategies let time count as communication, where the host waits for other ranks
training/step_looks.py      the steps that are timed or examined
training/monitor.py         a window each second: the row in `monitor.jsonl`, and what trackers receive
evidence.py                 what is known at the end of a training
rules.py                    each rule is a pure function: evidence → advice, or nothing
summary.py                  the lines that are printed at the end
record.py                   `monitor.jsonl`, written and read
"""
