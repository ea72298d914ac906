"""Training jobs: what a job is made of, and on which machines it can run.

    catalog/   machine types, accelerators, regions: data with its sources, and what fits together
    spec/      a job as its config.yaml and its flags describe it, checked and resolved

Nothing here runs a job yet.
"""
