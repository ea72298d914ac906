"""The program of `lab_chaos.py` on a Ray or Spark cluster: runs the training of `lab_train.py` with `Runner`.

python lab_chaos_program.py ray|spark WORLD HEAD HEARTBEAT_S PAUSE_S EPOCHS
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import footplate as fp


def train(pause_s: float, epochs: int) -> None:
    """Train in a rank. Its machine has `lab_train.py` on the shared disk."""
    import sys
    from pathlib import Path

    sys.path.insert(0, "/mnt")
    import lab_train

    lab_train.train(Path("/mnt/out"), pause_s, epochs)


def start_session(head: str) -> None:
    """Start a session on the standalone cluster whose master is on this machine."""
    from pyspark.sql import SparkSession

    settings: dict[str, Any] = {
        "spark.driver.host": head,
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Spark's cleaner waits for an executor that is silent, and the end of the session waits for the cleaner: 2 minutes.
        "spark.cleaner.referenceTracking.blocking": "false",
    }
    session = SparkSession.builder.master(f"spark://{head}:7077").config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")


def main(engine: str, world: int, head: str, heartbeat_s: float, pause_s: float, epochs: int) -> None:
    if engine == "spark":
        start_session(head)
    runner = fp.Runner(
        np=world,
        backend=engine,
        resources={"strategy": "STRICT_SPREAD"} if engine == "ray" else None,
        heartbeat_timeout=heartbeat_s,
        max_restarts=99,
        max_host_restarts=99,
    )
    runner.run(train, pause_s, epochs)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    engine, world, head, heartbeat_s, pause_s, epochs = sys.argv[1:]
    main(engine, int(world), head, float(heartbeat_s), float(pause_s), int(epochs))
