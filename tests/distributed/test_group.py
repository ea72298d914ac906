"""Communication between ranks, and exceptions on one rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from models import ranks

from footplate.core.errors import DataError
from footplate.distributed.group import ALONE, Group, join
from footplate.distributed.world import World


class Awkward(Exception):
    """An object that can't be restored from its pickle."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def group() -> Group:
    return join(World.from_environ(), "gloo", torch.device("cpu"))


def raising(error: Exception) -> Any:
    raise error


def test_what_one_rank_raises_is_raised_on_all_also_where_it_can_not_travel():
    def run():
        errors, alone = [], os.environ["RANK"] == "1"
        among = group()
        for error in (DataError("lost"), Awkward(7, "odd")):
            with pytest.raises(Exception) as caught:
                among.ask_each(lambda error=error: raising(error) if alone else "fine")
            errors.append((type(caught.value).__name__, str(caught.value)))
            with pytest.raises(Exception) as caught:
                among.ask_first(lambda error=error: raising(error))
            errors.append((type(caught.value).__name__, str(caught.value)))
        return [*errors, among.ask_each(lambda: alone)]

    first, second = ranks.run(run, 2)
    assert first == [
        ("DataError", "Rank 1: lost"), ("DataError", "lost"), ("RuntimeError", "Awkward: odd"), ("Awkward", "odd"), False
    ]  # fmt: skip
    assert second == [
        ("DataError", "lost"), ("DataError", "lost"), ("Awkward", "odd"), ("RuntimeError", "Awkward: odd"), True
    ]  # fmt: skip


def test_a_single_process_asks_itself():
    assert ALONE.ask_each(lambda: 3) == ALONE.ask_first(lambda: 3) == 3
    with pytest.raises(Awkward):
        ALONE.ask_each(lambda: raising(Awkward(1, "odd")))
