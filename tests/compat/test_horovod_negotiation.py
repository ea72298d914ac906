"""The table by which ranks agree on the next operation: one order for all, and no mistake blocks a rank forever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.compat.horovod.negotiation import (
    FUSION_BYTES,
    WARN_AFTER_S,
    Joined,
    Negotiation,
    Refuse,
    Run,
    Signature,
    disagreement,
    fuse,
)

HAVE = Signature("allreduce", ("float32",), ((2, 3),), (4,), op="average")
LARGE = replace(HAVE, shapes=((2**20,),))


def submit(table: Negotiation, rank: int, name: str = "x", signature: Signature = HAVE, numbers=()):
    return table.submit(rank, name, signature, numbers, now=0.0)


@given(st.data())
def test_all_runs_once_whatever_the_order_in_which_ranks_submit(data):
    ranks, names = data.draw(st.integers(1, 4)), data.draw(st.sets(st.text(max_size=3), max_size=6))
    orders = [data.draw(st.permutations(sorted(names))) for _ in range(ranks)]
    turns = data.draw(st.permutations([rank for rank in range(ranks) for _ in names]))
    table, queues = Negotiation(ranks), [iter(order) for order in orders]
    answers = [answer for rank in turns for answer in submit(table, rank, next(queues[rank]))]
    assert sorted(answer.names[0] for answer in answers) == sorted(names)
    assert all(isinstance(answer, Run) for answer in answers)


def test_nothing_runs_before_the_last_rank_has_it():
    table = Negotiation(3)
    assert submit(table, 2) == []
    assert submit(table, 0) == []
    assert submit(table, 1) == [Run(0, ("x",), (HAVE,), ((), (), ()), (0, 1, 2))]


def test_what_ranks_tell_beside_a_name_comes_in_the_order_of_ranks():
    table = Negotiation(3)
    gather = Signature("allgather", ("float32",), ((3,),), (4,))
    for rank in (2, 0):
        submit(table, rank, signature=gather, numbers=(rank * 10,))
    (run,) = submit(table, 1, signature=gather, numbers=(10,))
    assert run.numbers == ((0,), (10,), (20,))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(HAVE, shapes=((2, 4),)), "shape (2, 3), rank 1 (2, 4)"),
        (replace(HAVE, dtypes=("int32",)), "type float32, rank 1 int32"),
        (replace(HAVE, op="sum"), "reduction average, rank 1 sum"),
        (replace(HAVE, kind="broadcast"), "operation allreduce, rank 1 broadcast"),
        (replace(HAVE, prescale=0.5), "prescale 1.0, rank 1 0.5"),
        (
            replace(HAVE, shapes=((1,), (1,)), dtypes=("float32",) * 2, itemsizes=(4, 4)),
            "number of tensors 1, rank 1 2",
        ),
    ],
)
def test_ranks_that_disagree_are_told_who_has_what(other, said):
    table = Negotiation(2)
    submit(table, 0)
    (refused,) = submit(table, 1, signature=other)
    assert isinstance(refused, Refuse)
    assert said in refused.text
    assert refused.ranks == (0, 1)
    assert refused.mistake


def test_of_several_tensors_the_one_that_differs_is_named():
    have = replace(HAVE, shapes=((2,), (3,)), dtypes=("float32",) * 2, itemsizes=(4, 4), parts="net.weight, net.bias")
    assert "shape of net.bias (3,), rank 1 (4,)" in disagreement("p", {0: have, 1: replace(have, shapes=((2,), (4,)))})


def test_a_rank_that_has_joined_takes_part_in_sums():
    table = Negotiation(3)
    submit(table, 0)
    assert table.join(1) == []
    (run,) = submit(table, 2)
    assert run.joined == (1,)
    assert table.join(0) == []
    assert table.join(2) == [Joined(2)]
    submit(table, 0)
    assert submit(table, 1) == []  # after that, all are needed again


def test_joining_can_be_what_the_others_wait_for():
    table = Negotiation(2)
    submit(table, 0)
    (run,) = table.join(1)
    assert (run.names, run.joined) == (("x",), (1,))


@pytest.mark.parametrize("other", [Signature("allgather"), Signature("broadcast"), replace(HAVE, op="max")])
def test_what_zeros_would_spoil_is_refused_once_a_rank_has_joined(other):
    table = Negotiation(2)
    table.join(1)
    (refused,) = submit(table, 0, signature=other)
    assert "not supported while rank 1 has joined" in refused.text


def test_when_all_wait_for_different_things_all_are_told_what():
    table = Negotiation(3)
    submit(table, 0, "a")
    submit(table, 1, "b")
    table.wait(0, (0, "a"))
    assert table.stuck() == []  # ranks 1 and 2 may still come
    table.wait(1, (0, "b"))
    table.join(2)
    refused = table.stuck()
    assert {refusal.name for refusal in refused} == {"a", "b"}
    assert 'rank 0 waits for allreduce "a", rank 1 waits for allreduce "b", rank 2 has joined' in refused[0].text
    assert table.stuck() == []


def test_waiting_again_for_the_same_is_no_news():
    table = Negotiation(2)
    submit(table, 0)
    table.wait(0, (0, "x"))
    heard = table.heard
    table.wait(0, (0, "x"))
    assert table.heard == heard


def test_a_rank_that_has_left_is_not_waited_for():
    table = Negotiation(2)
    submit(table, 0)
    (refused,) = table.leave(1, "has gone")
    assert refused.text == 'allreduce "x": rank 1 has gone.'
    assert not refused.mistake
    (again,) = submit(table, 0, "y")
    assert not again.mistake


def test_an_operation_that_some_ranks_lack_for_long_is_told_once():
    table = Negotiation(2)
    submit(table, 0)
    assert table.stalled(WARN_AFTER_S) == []
    assert table.stalled(WARN_AFTER_S + 1) == ['allreduce "x" waits for rank(s) 1']
    assert table.stalled(WARN_AFTER_S + 2) == []


def test_a_process_set_needs_its_members_only():
    table = Negotiation(3)
    table.add_set(1, [0, 2])
    some = replace(HAVE, process_set=1)
    submit(table, 2, signature=some)
    (run,) = submit(table, 0, signature=some)
    assert run.members == (0, 2)
    assert run.process_set == 1


def runs(*signatures: Signature) -> list[Run]:
    return [Run(0, (str(n),), (signature,), ((), ()), (0, 1)) for n, signature in enumerate(signatures)]


def test_neighbouring_sums_of_one_kind_travel_together():
    other = replace(LARGE, op="sum")
    fused = fuse(runs(LARGE, LARGE, other, LARGE))
    assert [run.names for run in fused] == [("0", "1"), ("2",), ("3",)]


@pytest.mark.parametrize(
    ("signature", "together"),
    [
        (LARGE, False),
        (replace(LARGE, dtypes=("bfloat16",), op="product"), False),
        (replace(LARGE, dtypes=("complex64",)), False),
        (replace(LARGE, dtypes=("int32",)), True),
        (replace(LARGE, op="max"), True),
    ],
)
def test_of_three_ranks_only_what_may_be_added_in_any_order_travels_together(signature, together):
    first, second = (replace(run, members=(0, 1, 2)) for run in runs(signature, signature))
    assert len(fuse([first, second])) == (1 if together else 2)


def test_small_ones_stay_by_themselves_as_their_values_have_come_already():
    assert HAVE.small
    assert [run.names for run in fuse(runs(HAVE, HAVE, LARGE, HAVE))] == [("0",), ("1",), ("2",), ("3",)]


@pytest.mark.parametrize(
    "other",
    [
        LARGE,
        replace(HAVE, shapes=((0,),)),
        replace(HAVE, op="adasum"),
        replace(HAVE, device="cuda"),
        replace(HAVE, kind="reducescatter"),
    ],
)
def test_what_is_large_or_elsewhere_or_not_reduced_has_a_transfer_of_its_own(other):
    assert not other.small


def test_no_more_travels_together_than_the_limit():
    half = replace(LARGE, shapes=((FUSION_BYTES // 8,),))
    assert [run.names for run in fuse(runs(half, half, half))] == [("0", "1"), ("2",)]


@given(st.lists(st.sampled_from([HAVE, LARGE, replace(LARGE, op="sum"), Signature("barrier")])))
def test_fusing_keeps_order_and_loses_nothing(signatures):
    fused = fuse(runs(*signatures))
    assert [name for run in fused for name in run.names] == [str(n) for n in range(len(signatures))]
    assert [signature for run in fused for signature in run.signatures] == signatures


def test_a_signature_travels_as_json():
    import json

    assert Signature.from_json(json.loads(json.dumps(HAVE.to_json()))) == HAVE
