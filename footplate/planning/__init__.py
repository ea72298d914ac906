"""`fp.plan` and `footplate plan`: a training on hardware that isn't here, before it is paid for.

    study.py      from a module, a batch and names of hardware to a `Plan`: the order of events
    choices.py    a `Plan`: what each target would need and give
    subject.py    what is planned: a module without weights, an example batch, how long it trains
    known.py      subjects by name: the demo, a library's model, a configuration file
    targets.py    slices, GPUs and this machine, by name, with what the catalog knows of them
    plainform.py  a captured step as plain data, and its fingerprint
    compiled.py   the compiler's process: started, waited for, its answers kept
    compiler.py   that process: the TPU's own compiler, or XLA for this machine's CPU
    hlo.py        collectives, read from a compiled program
    graph.py      arithmetic, traffic and memory of a graph that nobody has compiled: for GPUs
    rates.py      this machine's own peak rates
    roofline.py   the least time of a step
    largest.py    the largest batch that fits
    measure.py    some steps run here, beside what was predicted
    report.py     a plan for people and for programs
    chart.py      a plan as a picture

Nothing is trained, and no weights are held. Sizes are in bytes and of one device, unless a name says otherwise.
"""
