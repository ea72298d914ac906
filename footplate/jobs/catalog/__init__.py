"""The catalog: which machines there are, which accelerators they take, where, and what replaces what is gone.

    data/         CSV files; each row names its source (a key of sources.csv) and the year for which it is known
    rows.py       the rows as dataclasses, and the catalog of them all
    lookup.py     finding a row by any spelling of its name
    validity.py   does a machine take these accelerators, and if not, why, and what is nearest
    regions.py    regions and zones
    successors.py what can no longer be had or soon won't be, and today's equivalent

All of it is plain data and pure functions; nothing asks a cloud. A cell is empty where no source is sure.
"""
