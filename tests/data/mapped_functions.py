"""Functions of `test_mapped_table.py`. A worker process imports this file, which imports nothing that is slow."""

from __future__ import annotations

from typing import Any


def lengths(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {"length": [len(value) for value in batch["text"]]}


def number(batch: dict[str, list[Any]]) -> dict[str, Any]:
    return {"number": batch["id"]}


def never(batch: dict[str, list[Any]]) -> dict[str, Any]:
    raise AssertionError("called")
