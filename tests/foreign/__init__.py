"""Other projects' test suites, run against Footplate.

Lightning's tests run with our Trainer, Petastorm's and Horovod's with `footplate.compat`. The suites themselves are
archives beside the checkout. `lists/` classifies each of their cases: see `cases.py`. Run them with `make foreign`.
"""
