"""Which Footplate this is: its version, and the directory that it is imported from."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

LIBRARY = str(Path(__file__).resolve().parents[2])
