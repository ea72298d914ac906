"""JAX with 64-bit numbers for tests that request them, and with a cache of compiled programs.

Compiled programs are kept between the tests and for the next run, also those that took less than a second to compile. Each
process of xdist has a folder of its own, since JAX doesn't write its files at once. The programs that tests start have
caches of their own.
"""

import os
from pathlib import Path

import jax

CACHE = Path(__file__).parents[3] / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE / os.environ.get("PYTEST_XDIST_WORKER", "alone")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
