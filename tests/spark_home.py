"""A home of Spark without its archive of PySpark.

Spark puts that archive in front of the path of its Python processes. It has no compiled modules, so each process would
compile PySpark again, for half a second. Without it, they import the installed PySpark, which is the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

ARCHIVES = "python"


def spark_home() -> Path | None:
    """Return the directory, in this environment: links to the parts of the installed PySpark. None without PySpark."""
    installed = importlib.util.find_spec("pyspark")
    if installed is None or installed.origin is None:
        return None
    home = Path(sys.prefix) / "spark-home"
    home.mkdir(exist_ok=True)
    for part in Path(installed.origin).parent.iterdir():
        if part.name != ARCHIVES:
            with contextlib.suppress(FileExistsError):
                (home / part.name).symlink_to(part)
    return home
