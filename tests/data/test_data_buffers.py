"""Memory is used again only when nobody can see it any more."""

from __future__ import annotations

import torch

from footplate.data.buffers import Buffers


def test_memory_comes_back_when_the_last_view_of_it_is_gone() -> None:
    buffers = Buffers()
    first = buffers.take((4, 3))
    place, view = first.data_ptr(), first[1:].flatten()
    del first
    assert buffers.take((4, 3)).data_ptr() != place
    del view
    assert place in {tensor.data_ptr() for tensor in [buffers.take((4, 3)), buffers.take((4, 3))]}


def test_tensors_that_are_alive_never_share_memory() -> None:
    buffers = Buffers()
    held = [buffers.take((2, 2)).fill_(number) for number in range(50)]
    assert [int(tensor[0, 0]) for tensor in held] == list(range(50))
    assert len({tensor.data_ptr() for tensor in held}) == 50


def test_memory_is_kept_alive_by_a_tensor_after_the_pool_is_gone() -> None:
    tensor = Buffers().take((8,)).fill_(7)
    assert torch.equal(tensor, torch.full((8,), 7, dtype=torch.uint8))
