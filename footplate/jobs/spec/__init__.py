"""A training job as its config.yaml and its flags describe it: read, merged, checked and resolved.

    yamlfile.py     config.yaml → document.py: plain values that know their text, and the line of each key
    flags.py        flags → the same form, each knowing the flag it came from
    draft.py        the two laid over each other, flags winning; where each value came from
    reading.py      plain values → the dataclasses of a model, and every mistake in them
    fields.py       the types of values, each with what it says of another
    model.py        Job and TrainingInput: which keys there are
    unknown_keys.py what is said of a key that there isn't
    naming.py       names, URIs, labels and durations: what they may look like
    scaling.py      scale tiers and the roles of a cluster
    checking.py     what one key says about another, and what the catalog says
    resolving.py    all of the above in order: a draft in, a resolved job or every problem out
    migration.py    a config.yaml rewritten for today's machines, its comments kept

A spec's problems are collected, not raised one by one: `problems.SpecError` carries all of them, each with its key and
with its line or its flag.
"""
