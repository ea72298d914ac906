"""Arithmetic and memory counted from a graph, compared with numbers computed by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.step_memory import measured_peak
from planning.nets import CLASSES, WIDTH, Small, batch
from torch import Tensor, nn
from torch.nn import functional as F

import footplate as fp
from footplate.planning.subject import Subject, captured
from footplate.step.xla.capture.needs import needs

WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH * CLASSES)


def counted(module, example, size, averages=False):
    about = Subject("it", module, example, size)
    return needs(captured(about, size, averages))


def test_products_count_forward_and_backward():
    counts = counted(Small(), batch(), 32)
    forward = 2 * 32 * (WIDTH * WIDTH + WIDTH * CLASSES)
    inputs_gradient = 2 * 32 * WIDTH * CLASSES  # of the second layer alone: nobody needs that of the batch
    assert counts.flops == 2 * forward + inputs_gradient


def test_state_and_batch_are_what_they_weigh():
    counts = counted(Small(), batch(), 32)
    assert counts.state_bytes == WEIGHTS
    assert counts.batch_bytes == 32 * (4 * WIDTH + 8)


def test_adamw_keeps_two_numbers_more_for_each_weight():
    class Adaptive(Small):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    steps = 2 * 4  # a count of steps for each parameter
    assert counted(Adaptive(), batch(), 32).state_bytes == 3 * WEIGHTS + steps


def test_memory_holds_state_gradients_and_activations_at_least():
    counts = counted(Small(), batch(4096), 4096)
    hidden = 4 * 4096 * WIDTH
    assert counts.peak_bytes >= counts.state_bytes + counts.batch_bytes + 2 * hidden
    assert counts.peak_bytes <= counts.state_bytes + counts.batch_bytes + 4 * hidden + 2 * WEIGHTS


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
    counts = counted(Small(), batch(), 32, averages=True)
    assert counts.averaged_bytes == WEIGHTS + 2 * 4  # the logged loss, and the loss
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
    counts = counted(Convolution(net), torch.zeros(4, 3, 16, 16), 4)
    assert counts.flops == counts.convolution_flops == 2 * forward


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
            for layer in self.each:
                nn.init.ones_(layer.weight)

        def forward(self, x):
            return torch.stack([layer(x).sum() for layer in self.each])

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


class Training(fp.Module):
    """A network with a loss of its output."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor], Tensor], kernels: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.loss, self.kernels = net, loss, kernels

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), **self.kernels)


class Decoder(nn.Module):
    """A transformer of one block and many words, so that the loss has the largest tensors."""

    def __init__(self, words: int = 2048, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.words = heads, nn.Embedding(words, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width), nn.Dropout(0)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(self.norms[1](x))).flatten(0, 1)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.zeros(len(output), dtype=torch.int64, device=output.device))


def linear() -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    layers = [nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), *(nn.Linear(256, 256) for _ in range(3))]
    return nn.Sequential(*layers), square, torch.randn(1024, 256)


def normalized() -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    layers = [nn.Linear(256, 1024, bias=False), nn.BatchNorm1d(1024), nn.ReLU(inplace=True), nn.Dropout(0)]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), entropy, torch.randn(1024, 256)


def many_weights() -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), square, torch.randn(16, 512)


def decoder() -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    return Decoder(), entropy, torch.zeros(4, 128, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "kernels", "precision"),
    [
        (linear, {"fused": True}, "32-true"),
        (normalized, {"fused": True}, "32-true"),
        (decoder, {"foreach": True}, "bf16-mixed"),
        (many_weights, {"fused": True}, "32-true"),
        (many_weights, {"foreach": True}, "32-true"),
    ],
)
def test_the_peak_is_that_of_eager_steps(make, kernels, precision):
    net, loss, example = make()
    module = Training(net, loss, kernels)
    subject = Subject("it", module, example, len(example), precision)
    estimate = needs(captured(subject, len(example), False)).peak_bytes
    assert estimate == pytest.approx(measured_peak(module, module.configure_optimizers(), example, precision), rel=0.1)


def test_an_optimizer_for_all_parameters_at_once_is_assumed_without_a_setting():
    net, loss, example = many_weights()
    default, foreach, fused = (
        counted(Training(net, loss, kernels), example, len(example)).peak_bytes
        for kernels in ({}, {"foreach": True}, {"fused": True})
    )
    weights = sum(parameter.nbytes for parameter in net.parameters())
    assert default == foreach
    assert foreach - fused == pytest.approx(weights, rel=0.1)
