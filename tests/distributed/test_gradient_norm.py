"""Norms and clipping of gradients on several meshes: what torch gives for whole gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from models import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from footplate.distributed.gradient_norm import clip, total_norm

VALUES = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9)


def with_gradients(*values):
    parameters = [nn.Parameter(torch.zeros(len(numbers))) for numbers in values]
    for parameter, numbers in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(numbers)
    return parameters


@given(st.lists(VALUES, min_size=1, max_size=4), st.floats(0.01, 1e4), st.sampled_from(["norm", "value"]))
def test_whole_gradients_are_clipped_as_torch_clips_them(values, limit, algorithm):
    ours, theirs = with_gradients(*values), with_gradients(*values)
    norm = math.sqrt(sum(number**2 for numbers in values for number in numbers))
    assert total_norm([parameter.grad for parameter in ours]).item() == pytest.approx(norm, rel=1e-5)

    clip(ours, limit, algorithm)
    if algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(theirs, limit)
    else:
        torch.nn.utils.clip_grad_value_(theirs, limit)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_nothing_is_clipped_where_there_are_no_gradients():
    parameter = nn.Parameter(torch.ones(2))
    clip([parameter], 1.0, "norm")
    assert parameter.grad is None
    assert total_norm([]).item() == 0.0


def test_each_part_counts_once_however_a_gradient_is_cut():
    gradients = [torch.arange(6.0).view(3, 2) + number for number in range(5)]

    def norm():
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        both, data = [Shard(0), Shard(1)], mesh["data_parallel"]
        cut = [
            distribute_tensor(gradients[0], mesh, both),
            distribute_tensor(gradients[1], mesh, [Shard(0), Replicate()]),
            distribute_tensor(gradients[2], mesh, [Replicate(), Shard(1)]),
            distribute_tensor(gradients[3], data, [Shard(0)]),
            gradients[4],
        ]
        return total_norm(cut).item()

    expected = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm().item()
    assert ranks.run(norm, 4) == [pytest.approx(expected)] * 4
