"""TPUs: what their names mean, what this machine says of its own, and the second route to them.

    names.py           `v3-8`, `v5litepod-16`: generation, chips, cores, hosts, topology, memory; from `data/`
    surroundings.py    which TPU this is: the environment's variables, or the metadata server
    metadata.py        that server, as far as it speaks of a TPU
    older.py           XRT_TPU_CONFIG, from the days of TPU nodes
    versions.py        jax, jaxlib, libtpu, torch, torch_tpu: which go together
    findings.py        all of this together, for the doctor and for a trainer that begins
    pitfalls.py        what makes training slow on a TPU without a word, as sentences with a hint
    native.py          the `tpu` device of torch itself, from the package torch_tpu

Nothing here has run on a TPU.
"""
