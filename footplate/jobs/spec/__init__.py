"""A training job as its config.yaml and its flags describe it: read, merged, checked and resolved.

    yamlfile.py     config.yaml → document.py: plain values with their text, and the line of each key
    flags.py        flags → the same form, each with the flag that it came from
    draft.py        flags laid over the file, and the origin of each value
    reading.py      plain values → the dataclasses of a model, and all mistakes in them
    fields.py       the types of values, each with its error message
    model.py        Job and TrainingInput: the known keys
    naming.py       the allowed forms of names, URIs, labels and durations
    scaling.py      scale tiers, and the roles of a cluster
    checking.py     the checks of keys against each other, and against the catalog
    resolving.py    all of the above in order: from a draft to a resolved job, or to all of its problems
    migration.py    a config.yaml rewritten for machines that still exist, with its comments

Problems are collected: `problems.SpecError` carries all of them, each with its key, and with its line or flag.
"""
