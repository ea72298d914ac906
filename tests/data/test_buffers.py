"""Memory is used again only when no array refers to it any more."""

from __future__ import annotations

import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.data.pipeline.buffers import Buffers


def test_memory_comes_back_when_the_last_view_of_it_is_gone() -> None:
    buffers = Buffers()
    first = torch.from_numpy(buffers.take((4, 3)))
    place, view = first.data_ptr(), first[1:].flatten()
    del first
    assert torch.from_numpy(buffers.take((4, 3))).data_ptr() != place
    del view
    assert place in {array.ctypes.data for array in [buffers.take((4, 3)), buffers.take((4, 3))]}


def test_a_view_made_by_numpy_keeps_the_memory_too() -> None:
    buffers = Buffers()
    view = buffers.take((4, 3), np.float32)[1:, 2].reshape(-1)
    view[:] = 7
    for _ in range(3):
        buffers.take((4, 3), np.float32)[:] = 0
    assert view.tolist() == [7, 7, 7]


def test_arrays_that_are_alive_never_share_memory() -> None:
    buffers = Buffers()
    held = [buffers.take((2, 2)) for number in range(50)]
    for number, array in enumerate(held):
        array[:] = number
    assert [int(array[0, 0]) for array in held] == list(range(50))
    assert len({array.ctypes.data for array in held}) == 50


def test_memory_serves_other_shapes_and_types_of_about_its_size() -> None:
    buffers = Buffers()
    place = buffers.take((1000,), np.float32).ctypes.data
    assert buffers.take((2, 400), np.int32).ctypes.data == place
    assert buffers.take((400,), np.int64).ctypes.data == place


def test_a_small_request_leaves_large_memory_to_large_ones() -> None:
    buffers = Buffers()
    held = [buffers.take((1000,)), buffers.take((1000,)), buffers.take((4,))]
    places = [array.ctypes.data for array in held]
    held.clear()
    small = buffers.take((4,))
    large = [buffers.take((1000,)), buffers.take((1000,))]
    assert small.ctypes.data == places[2]
    assert {array.ctypes.data for array in large} == set(places[:2])


def test_memory_of_windows_that_end_together_serves_those_that_follow_together() -> None:
    buffers = Buffers()
    held = [buffers.take((1000,)) for _ in range(20)]
    places = {array.ctypes.data for array in held}
    held.clear()
    assert {array.ctypes.data for array in [buffers.take((1000,)) for _ in range(20)]} == places


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=60))
def test_lent_and_free_together_are_never_more_than_the_most_that_was_lent(takes: list[tuple[int, bool]]) -> None:
    buffers, held, most = Buffers(), [], 0
    for nbytes, give_back in takes:
        held.append(buffers.take((nbytes,)))
        most = max(most, buffers._used_bytes)
        assert buffers._used_bytes + sum(memory.nbytes for memory in buffers._free) <= most
        if give_back:
            held.pop(len(held) // 2)


def test_memory_is_kept_alive_by_a_tensor_after_the_pool_is_gone() -> None:
    tensor = torch.from_numpy(Buffers().take((8,))).fill_(7)
    assert torch.equal(tensor, torch.full((8,), 7, dtype=torch.uint8))


def test_threads_never_get_the_same_memory() -> None:
    buffers, clashes = Buffers(), []

    def work(number: int) -> None:
        for _ in range(2000):
            array = buffers.take((64,))
            array[:] = number
            if not (array == number).all():
                clashes.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
