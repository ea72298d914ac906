"""Prepares the import of Lightning beside a torch for the CPU before any test here (see `models`)."""

import models  # noqa: F401
