"""Arithmetic and memory counted from a graph, compared with numbers computed by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from planning.nets import CLASSES, WIDTH, Small, batch
from torch import nn

import footplate as fp
from footplate.planning.subject import Subject, captured
from footplate.step.xla.capture.needs import needs

WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH * CLASSES)


def counted(module, example, size, averages=False):
    about = Subject("it", module, example, size)
    return needs(captured(about, size, averages))


def test_products_count_forward_and_backward():
    found = counted(Small(), batch(), 32)
    forward = 2 * 32 * (WIDTH * WIDTH + WIDTH * CLASSES)
    inputs_gradient = 2 * 32 * WIDTH * CLASSES  # of the second layer alone: nobody needs that of the batch
    assert found.flops == 2 * forward + inputs_gradient


def test_state_and_batch_are_what_they_weigh():
    found = counted(Small(), batch(), 32)
    assert found.state_bytes == WEIGHTS
    assert found.batch_bytes == 32 * (4 * WIDTH + 8)


def test_adamw_keeps_two_numbers_more_for_each_weight():
    class Adaptive(Small):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    steps = 2 * 4  # a count of steps for each parameter
    assert counted(Adaptive(), batch(), 32).state_bytes == 3 * WEIGHTS + steps


def test_memory_holds_state_gradients_and_activations_at_least():
    found = counted(Small(), batch(4096), 4096)
    hidden = 4 * 4096 * WIDTH
    assert found.peak_bytes >= found.state_bytes + found.batch_bytes + 2 * hidden
    assert found.peak_bytes <= found.state_bytes + found.batch_bytes + 4 * hidden + 2 * WEIGHTS


def test_what_grows_with_the_batch_grows_in_proportion():
    one, two, three = (counted(Small(), batch(), size).peak_bytes for size in (4096, 8192, 12288))
    assert three - two == pytest.approx(two - one, rel=0.01)


def test_a_chain_of_elementwise_operations_needs_no_memory_for_each():
    class Deep(Small):
        def forward(self, x):
            with torch.no_grad():
                for _ in range(20):
                    x = x * 1.5 + 1
            return x

        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((self(x), y), batch_idx)

    plain, deep = (counted(module, batch(), 4096).peak_bytes for module in (Small(), Deep()))
    assert deep - plain <= 2 * 4 * 4096 * WIDTH


def test_what_devices_exchange_is_the_gradients_and_what_is_logged():
    found = counted(Small(), batch(), 32, averages=True)
    assert found.averaged_bytes == WEIGHTS + 2 * 4  # the logged loss, and the loss
    assert counted(Small(), batch(), 32).averaged_bytes == 0


class Convolution(fp.Module):
    """One convolution, and the mean square of its output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_convolution_counts_by_its_outputs_without_products_with_padding():
    net = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    forward = 2 * 4 * 8 * 3 * (3 * 16 - 2) ** 2  # at either edge one tap of three meets padding
    found = counted(Convolution(net), torch.zeros(4, 3, 16, 16), 4)
    assert found.flops == found.convolution_flops == 2 * forward


def test_a_depthwise_convolutions_channels_meet_no_others_forward_or_backward():
    net = nn.Conv2d(64, 64, 7, groups=64, bias=False)
    forward = 2 * 4 * 64 * 49 * 10 * 10
    assert counted(Convolution(net), torch.zeros(4, 64, 16, 16), 4).flops == 2 * forward


def test_products_of_a_convolution_are_as_many_as_its_ones_add_up_to():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            kinds = itertools.product((1, 3), (1, 2), (0, 2), (1, 2), (nn.Conv1d, nn.ConvTranspose1d))
            self.each = nn.ModuleList(
                make(1, 1, kernel, stride, padding, dilation=dilation, bias=False)
                for kernel, stride, padding, dilation, make in kinds
            )
            for one in self.each:
                nn.init.ones_(one.weight)

        def forward(self, x):
            return torch.stack([one(x).sum() for one in self.each])

    net, ones = Many(), torch.ones(1, 1, 9)
    products = net(ones).sum().item()
    assert counted(Convolution(net), ones, 1).flops == 2 * 2 * products  # forward, and backward to the weights


def test_parts_of_a_tensor_lie_in_its_memory():
    class Parts(Small):
        def training_step(self, batch, batch_idx):
            x, y = batch
            one, two = self.first(x).chunk(2, -1)
            return super().training_step((torch.cat([one, two], -1), y), batch_idx)

    assert (
        counted(Parts(), batch(), 4096).peak_bytes < counted(Small(), batch(), 4096).peak_bytes + 5 * 4 * 4096 * WIDTH
    )


def test_causal_attention_counts_half_of_what_all_to_all_does():
    class Attending(fp.Module):
        def __init__(self, causal):
            super().__init__()
            self.qkv, self.causal = nn.Linear(16, 48, bias=False), causal

        def training_step(self, batch, batch_idx):
            q, k, v = self.qkv(batch).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    whole, half = (counted(Attending(causal), torch.zeros(2, 1, 8, 16), 2).flops for causal in (False, True))
    attention = (2 + 5) * 2 * 2 * 8 * 8 * 16
    assert whole - half == attention / 2
