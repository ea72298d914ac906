"""Captured steps as plain data that another process can read."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch

import footplate.planning.serialized_step


@pytest.mark.parametrize(
    "memory_format", [torch.preserve_format, torch.contiguous_format, torch.channels_last], ids=str
)
def test_a_memory_format_is_pickled_without_the_callers_main_module(memory_format):
    pickled = pickle.dumps(memory_format)
    strings = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
    assert footplate.planning.serialized_step.__name__ in strings
    assert not any("main" in string for string in strings)
    assert pickle.loads(pickled) is memory_format
