"""The step as a program of XLA: captured once, compiled once, run on every device of this process.

    batch ──► split over the devices ──► one program: (state, rates, key, batch) → (state, loss, logs)
                                              ▲ the state stays on the devices, in the memory of the one before

    step.py          what the trainer asks for: train and evaluate
    weights.py       where the weights are, and how they get to whoever wants to see them
    program_cache.py one program for each form of batch: captured, compiled, counted
    program.py       one of them, as functions that run on the devices
    sharding.py      how a batch is split, and what is done with one that can't be
    processes.py     several processes, one on each machine
    placing.py       batches on the devices, when their step asks or ahead of it
    values.py        what comes back, read when it is needed
    support.py       what can't be trained so, refused before any work begins

A process drives all devices of its machine; for the loaders it is one rank, whose batch is split over them.
`docs/reference/xla-limits.md` says what is supported. Importing `program`, `programs`, `sharing`, `placing`, `values`
or `weights` imports JAX.
"""
