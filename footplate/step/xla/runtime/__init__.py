"""The step as a program of XLA: captured once, compiled once, run on every device of this process.

    batch ──► split over the devices ──► one program: (state, rates, key, batch) → (state, loss, logs)
                                              ▲ the state stays on the devices, and reuses the memory of the one before

    xla_step.py         the step that the trainer calls: train and evaluate
    weights.py          the state on the devices, and its copies on the host
    program_cache.py    one program for each form of batch: captured, compiled, counted
    program.py          one program, as functions that run on the devices
    sharding.py         how a batch is split, and what happens to one that can't be
    batch_exchange.py   batches of several processes, one process on each machine
    batch_placement.py  batches on the devices, moved by the step or by a prefetch thread
    device_values.py    results on the devices, read when they are needed
    support.py          settings that can't be trained so, refused before any work begins

A process drives all devices of its machine. The loaders see one rank, whose batch is split over the devices.
`docs/reference/xla-limits.md` says what is supported. Importing this package imports no JAX; most of its modules do.
"""
