"""A pytest plugin for the inner run: `petastorm` is `footplate.compat.petastorm`; see the package `petastorm` beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import petastorm
import pytest
import torch
from foreign_recorder import counts_calls_of, counts_use_of

from footplate.compat.petastorm.predicates import in_intersection, in_lambda, in_pseudorandom_split, in_set
from footplate.data.table import Table

# The CPU build of torch lacks torchvision's operators, which torchvision expects to be declared when it is imported.
if not hasattr(torch.ops.torchvision, "nms"):
    _declared = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _declared.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
for _class in (Table, in_set, in_intersection, in_lambda, in_pseudorandom_split):
    counts_use_of(_class)
for _module, _function in (("petastorm.pytorch", "decimal_friendly_collate"), ("petastorm.transform", "edit_field")):
    petastorm.OFFERED[_module][_function] = counts_calls_of(petastorm.OFFERED[_module][_function])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    petastorm.refuse_absent_names(True)
    try:
        return (yield)
    finally:
        petastorm.refuse_absent_names(False)


class _Hooks:
    """Hooks of pytest plugins that Petastorm's conftest uses."""

    @staticmethod
    def pytest_logger_config(logger_config: object) -> None:
        """A hook of pytest-logger."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(_Hooks)
