"""Spark sessions with real executors, one for all launch tests, and functions that recognise Spark's own processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

_shared = ExitStack()
_sessions: list[Any] = []


def spark_session() -> Any:
    """The session: two executors of one core each, both with a fake GPU, number 5. The first call starts it."""
    if not _sessions:
        gpus = Path(_shared.enter_context(tempfile.TemporaryDirectory())) / "discover"
        gpus.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["5"]}'\n""")
        gpus.chmod(0o755)
        settings = {
            "spark.worker.resource.gpu.amount": "1",
            "spark.worker.resource.gpu.discoveryScript": str(gpus),
            "spark.executor.resource.gpu.amount": "1",
            "spark.decommission.enabled": "true",
        }
        _sessions.append(_shared.enter_context(two_executors(settings)))
    return _sessions[0]


def end_spark_session() -> None:
    """Stop the session, if it runs."""
    _sessions.clear()
    _shared.close()


@contextmanager
def two_executors(settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Start a session with two executors of one core each, on loopback, and stop it afterwards. Launches wait for them."""
    from pyspark.sql import SparkSession

    from footplate.launch.cluster import spark

    spark.REGISTER_S = spark.START_S = (
        240.0  # executors are two Java processes, which take seconds even on an idle machine
    )
    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    for name, value in {**quiet, **here, **(settings or {})}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def is_sparks(process: psutil.Process) -> bool:
    """Return True for Java, for a daemon that forks Python workers, and for an idle Python worker."""
    try:
        return process.name() == "java" or "pyspark.daemon" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
