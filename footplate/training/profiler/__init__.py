"""The profiler: what a range of training steps spends its time and memory on, by operator and by line of the user's code.

    settings.py         `Profiler`, what users write; the range of `footplate run --profile`
    step_profiles.py    which steps are recorded: ranges known before, and requests to a training that runs
    recording.py        one profile of one rank, from its first step to its files; nothing of it ends the training
    regions.py          names of the phases of a step in the trace, and their times, while a profile is recorded
    torch_trace.py      the recording by torch.profiler (Kineto)
    jax_trace.py        the recording by JAX's profiler, in runs on XLA
    event_tree.py       torch's events, summed by operator and by line
    source_operators.py the lines of `a @ b` and other symbols, from the source
    tables.py           the results as plain data, and as Markdown, CSV and a summary

Nothing of torch.profiler is imported before the first profile. Without a profile, a step costs one comparison more.
"""
