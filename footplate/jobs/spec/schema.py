"""Pydantic, as far as the spec uses it: imported here alone, so that where it is missing, one message says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.extras import require

if not TYPE_CHECKING:
    require("pydantic", "jobs", "A job's specification")

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

__all__ = [
    "BaseModel",
    "BeforeValidator",
    "ConfigDict",
    "Field",
    "PydanticCustomError",
    "ValidationError",
    "to_camel",
]
