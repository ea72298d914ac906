"""The catalog: machine types, the accelerators that they take, regions, and successors of machines that no longer exist.

    data/         CSV files; each row names its source (a key of sources.csv) and the year of the information
    rows.py       the rows as dataclasses, and the catalog of all rows
    lookup.py     find a row by any spelling of its name
    validity.py   check if a machine takes certain accelerators; if not, explain why, and find the nearest choice
    regions.py    regions and zones
    successors.py machines and accelerators that no longer exist, or soon won't, and their equivalents

The catalog is plain data and pure functions, and never queries a cloud. A cell is empty if no source is certain.
"""
