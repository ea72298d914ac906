"""Tensors of small operations, reduced by rank 0."""

from __future__ import annotations

import struct

import torch

from footplate.compat.horovod.negotiation import Signature
from footplate.compat.horovod.operations import Request, packed, reduced


def test_tensors_of_several_types_are_reduced_each_in_its_own():
    signature = Signature("allreduce", ("uint8", "float64"), ((3,), (2,)), (1, 8), op="max")
    packs = [
        packed(Request(signature, [torch.tensor([n, 2, 3], dtype=torch.uint8), torch.tensor([0.5, -n]).double()]))
        for n in (1, 9, 5)
    ]
    assert reduced(signature, packs) == bytes([9, 2, 3]) + struct.pack("=dd", 0.5, -1)
