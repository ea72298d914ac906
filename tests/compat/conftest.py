"""Before any test here imports Lightning: what its import needs beside a torch for the CPU (see `models`)."""

import models  # noqa: F401
