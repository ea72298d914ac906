"""Which blocks count as equal."""

from __future__ import annotations

import torch
from torch import nn

from footplate.planning.equal_blocks import longest_list, shorten


class Block(nn.Module):
    def __init__(self, number: int, width: int = 4, rate: float = 0.1) -> None:
        super().__init__()
        self.layer_idx = number
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(rate), nn.Linear(width, 4))


class Net(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def test_blocks_that_differ_by_their_number_alone_are_equal():
    net = Net(*(Block(number) for number in range(6)))
    assert longest_list(net) == ("blocks", 6)
    shorten(net, "blocks", 3)
    assert len(net.blocks) == 3


def test_a_block_of_another_width_another_rate_or_another_type_is_unequal():
    for odd in (Block(5, width=8), Block(5, rate=0.2), Block(5).bfloat16(), Block(5).requires_grad_(False)):
        assert longest_list(Net(*(Block(number) for number in range(5)), odd)) is None


def test_an_attribute_that_is_an_array_is_taken_for_another():
    blocks = [Block(number) for number in range(6)]
    for block in blocks:
        block.slopes = torch.arange(4)
    assert longest_list(Net(*blocks)) is None


def test_a_number_that_is_not_the_blocks_own_makes_a_difference():
    assert longest_list(Net(*(Block(2 * number) for number in range(6)))) is None


def test_a_short_list_is_left_whole():
    assert longest_list(Net(*(Block(number) for number in range(4)))) is None
