"""Payloads: values arrive unchanged, and large tensors without copies on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from footplate.launch import payload


@pytest.fixture
def there_and_back():
    fd = payload.create()

    def travel(value):
        payload.write(fd, value)
        return payload.read(fd)

    yield travel
    os.close(fd)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10),
        torch.tensor(1.5),
        torch.empty(0),
        torch.ones(3, 4)[:, 1:3],
        torch.ones(2, 2, dtype=torch.bfloat16).t(),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.layout}-{tensor.device}",
)
def test_tensors_arrive_as_they_were(there_and_back, tensor):
    arrived = there_and_back(tensor)
    assert (type(arrived), arrived.dtype, arrived.device, arrived.shape, arrived.layout, arrived.requires_grad) == (
        type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.layout, tensor.requires_grad,
    )  # fmt: skip
    if tensor.device.type == "cpu":
        assert torch.equal(arrived.to_dense(), tensor.to_dense())
        assert arrived.stride() == tensor.stride() if tensor.layout == torch.strided else True


def test_tensors_that_share_memory_still_do(there_and_back):
    whole = torch.arange(6.0)
    arrived, part = there_and_back((whole, whole[2:4]))
    arrived[2] = 77
    assert part.tolist() == [77, 3]


def test_modules_optimizers_and_arrays_arrive(there_and_back):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    arrived, state, array = there_and_back((net, optimizer.state_dict(), np.arange(5)))
    assert arrived[1].weight is arrived[0].weight
    assert all(torch.equal(a, b) for a, b in zip(arrived.parameters(), net.parameters(), strict=True))
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_two_values_are_read_one_after_the_other():
    fd = payload.create()
    payload.write(fd, "a report", torch.arange(3))
    first, load = payload.read_two(fd)
    assert first == "a report"
    assert load().tolist() == [0, 1, 2]
    os.close(fd)


def test_large_arrays_arrive_as_they_were_and_may_be_written_to(there_and_back):
    for sent in (np.arange(100_000.0), np.asfortranarray(np.ones((300, 400))), np.ones((400, 300))[::2]):
        arrived = there_and_back(sent)
        assert (arrived == sent).all()
        assert arrived.flags.f_contiguous == sent.flags.f_contiguous
        arrived[0] = -1
        assert (there_and_back(sent) == sent).all()
    fixed = np.ones(100_000)
    fixed.flags.writeable = False
    assert not there_and_back(fixed).flags.writeable


def test_what_one_process_writes_to_a_large_tensor_no_other_sees():
    fd = payload.create()
    payload.write(fd, torch.zeros(100_000))
    mine, yours = payload.read(fd), payload.read(fd)
    mine += 1
    assert (int(mine.sum()), int(yours.sum()), int(payload.read(fd).sum())) == (100_000, 0, 0)
    os.close(fd)
    assert int(yours.sum()) == 0  # it lives on without the descriptor


def test_large_and_small_values_stand_one_behind_the_other():
    values = [("a report", np.arange(50_000)), {"weights": [torch.full((n,), float(n)) for n in (3, 40_000, 70_001)]}]
    fd = payload.create()
    payload.write(fd, *values)
    (word, numbers), load = payload.read_two(fd)
    assert word == "a report"
    assert (numbers == values[0][1]).all()
    assert all(torch.equal(a, b) for a, b in zip(load()["weights"], values[1]["weights"], strict=True))
    os.close(fd)


def test_a_large_tensor_is_copied_neither_on_the_way_out_nor_on_the_way_in():
    program = """
    import re, torch
    from footplate.launch import payload

    def peak():
        return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024

    large = torch.ones(50_000_000)  # 200 MB
    fd, before = payload.create(), peak()
    payload.write(fd, large)
    written = peak()
    arrived = payload.read(fd)
    print(written - before, peak() - written, arrived[-1].item())
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    out, back, last = map(float, ended.stdout.split())
    assert out < 50
    assert back < 50
    assert last == 1
