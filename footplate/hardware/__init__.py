"""Hardware: one file for each accelerator, the registry that finds them, and `footplate doctor`.

`base` is the contract; `cpu`, `cuda` and `mps` keep it; `registry` finds these and other packages' by name; `devices`
and `legacy` read what users write for `devices=`, today and in older scripts; `machine`, `nvml` and `packages` look at
what is here, and `doctor` draws the conclusions.
"""
