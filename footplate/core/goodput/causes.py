"""The causes of a ledger. Each second has one."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """The cause of a second. The order is that of a table."""

    TRAINING = "training"
    INPUT = "input"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    CALLBACKS = "callbacks"
    LOST = "lost"
    STARTUP = "startup"
    DOWN = "down"
    SHUTDOWN = "shutdown"
    UNKNOWN = "unknown"
    QUEUED = "queued"
    IDLE = "idle"


LABELS = {
    Cause.TRAINING: "training",
    Cause.INPUT: "waiting for input",
    Cause.CHECKPOINT: "checkpoints",
    Cause.VALIDATION: "validation",
    Cause.CALLBACKS: "logging and callbacks",
    Cause.LOST: "lost, trained again",
    Cause.STARTUP: "start-up",
    Cause.DOWN: "down between attempts",
    Cause.SHUTDOWN: "shut-down",
    Cause.UNKNOWN: "unknown",
    Cause.QUEUED: "queued",
    Cause.IDLE: "ended, before it was continued",
}
"""Descriptions for people."""

NOT_DUE = frozenset({Cause.QUEUED, Cause.IDLE})
"""Causes of seconds in which nothing was to run. Goodput is a share of the other seconds."""

# The causes of a window in monitor.jsonl → the causes of the ledger.
OF_WINDOW = {
    "transfer": Cause.TRAINING,
    "forward": Cause.TRAINING,
    "backward": Cause.TRAINING,
    "optimizer": Cause.TRAINING,
    "communication": Cause.TRAINING,
    "step": Cause.TRAINING,
    "dispatch": Cause.TRAINING,
    "compilation": Cause.STARTUP,
    "input": Cause.INPUT,
    "callbacks": Cause.CALLBACKS,
    "logging": Cause.CALLBACKS,
    "checkpoint": Cause.CHECKPOINT,
    "validation": Cause.VALIDATION,
}
