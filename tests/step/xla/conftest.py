"""JAX on the CPU, as eight devices, with 64-bit numbers for tests that request them."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
