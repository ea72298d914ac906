"""What goes over the connections by which ranks negotiate."""

from __future__ import annotations

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.compat.horovod.link import _encoded, _Stream
from footplate.compat.horovod.negotiation import Signature
from footplate.compat.horovod.operations import Request, packed, reduced

MESSAGES = st.tuples(st.lists(st.integers() | st.text()), st.binary())


@given(st.lists(MESSAGES), st.lists(st.integers(1, 40)))
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(messages, lengths):
    whole, stream, found = b"".join(_encoded(*one) for one in messages), _Stream(), []
    for length in lengths:
        found += stream.feed(whole[:length])
        whole = whole[length:]
    assert found + stream.feed(whole) == messages


def test_tensors_of_several_types_are_reduced_each_in_its_own():
    signature = Signature("allreduce", ("uint8", "float64"), ((3,), (2,)), (1, 8), op="max")
    packs = [
        packed(Request(signature, [torch.tensor([n, 2, 3], dtype=torch.uint8), torch.tensor([0.5, -n]).double()]))
        for n in (1, 9, 5)
    ]
    assert reduced(signature, packs) == bytes([9, 2, 3]) + struct.pack("=dd", 0.5, -1)
