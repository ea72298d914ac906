"""Spark sessions with real executors, and functions that recognise Spark's own child processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil


@contextmanager
def two_executors(settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Start a session with two executors of one core each, on loopback, and stop it afterwards. Launches wait for them."""
    from pyspark.sql import SparkSession

    from footplate.launch.cluster import spark

    spark.REGISTER_S = 240.0  # executors are two Java processes, which take seconds even on an idle machine
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
