"""A training on XLA with a profile, in a process of its own: `python -m training.xla_profile DIRECTORY CACHE [SIZE …]`.

Before the training, the process makes a program for each size.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils.data import DataLoader

import footplate as fp
from training.profiled_nets import Wide

if __name__ == "__main__":
    directory, cache, *sizes = sys.argv[1:]
    config: Any = jax.config
    config.update("jax_compilation_cache_dir", cache)
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    for size in map(int, sizes):
        jax.jit(jnp.tanh)(jnp.ones(size)).block_until_ready()
    data = DataLoader(torch.randn(2560, 512), batch_size=256)
    trainer = fp.Trainer(
        accelerator="xla", max_steps=6, profiler=fp.Profiler("2:4"), default_root_dir=directory, log_every_n_steps=1
    )
    trainer.fit(Wide(512), data)
