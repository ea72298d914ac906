"""TPUs: the names of slices, the environment of this machine, and a second way to use them.

    names.py           `v3-8`, `v5litepod-16`: generation, chips, cores, hosts, topology, memory; from `data/`
    environment.py     the TPU of this machine, from environment variables and the metadata server
    metadata.py        the metadata server's attributes about a TPU
    xrt_config.py      XRT_TPU_CONFIG, the variable of the former TPU nodes
    versions.py        matching versions of jax, jaxlib, libtpu, torch and torch_tpu
    report.py          all of this together, for the doctor and for the beginning of training
    pitfalls.py        causes of silent slowness on a TPU, each as a text with a hint
    torch_tpu.py       torch's own device `tpu`, from the package torch_tpu

Nothing in this package has run on a TPU.
"""
