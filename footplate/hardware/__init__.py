"""Hardware: one file for each accelerator, the registry that finds them, and `footplate doctor`.

- `base` is the contract of an accelerator. `cpu`, `cuda`, `mps`, `xla` and `tpu/` implement it.
- `registry` finds an accelerator by its name, including those of other packages.
- `devices` parses `devices=`, and `legacy` the arguments of older scripts.
- `machine`, `nvml` and `packages` read facts about this machine. `doctor` reports them with problems and advice.
- `transfer` copies batches to devices.
"""
