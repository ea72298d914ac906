"""The step as a program of XLA: captured once, compiled once, run on every device of this process.

    batch ──► split over the devices ──► one program: (state, rates, key, batch) → (state, loss, logs)
                                              ▲ the state stays on the devices, in the memory of the one before

    step.py       what the trainer asks for: train, evaluate, and the weights when somebody wants to see them
    programs.py   one program for each form of batch: captured, compiled, counted
    sharing.py    how a batch is split, and what is done with one that can't be
    values.py     what comes back, read when it is needed
    support.py    what can't be trained so, refused before any work begins

The trainer's own process drives all devices; for the loaders there is one rank, whose batch is the global one.
`docs/xla.md` says what is supported. Importing `programs`, `sharing` or `values` imports JAX.
"""
