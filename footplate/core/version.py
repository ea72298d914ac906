"""The version of Footplate, and the directory that Python imports it from."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
"""The version of Footplate."""

LIBRARY = str(Path(__file__).resolve().parents[2])
