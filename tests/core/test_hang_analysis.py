"""From stacks to a sentence: each rule in a table, and properties of all sentences."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.stacks.analysis import explain, explain_alone, unchanged, where
from footplate.core.stacks.snapshot import Collective, Frame, Process, State, Thread

SITE = "/venv/lib/python3.11/site-packages"
C10D = Frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 3216)
WRAPPER = Frame("_exception_logger.<locals>.wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 83)
BACKWARD = Frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 979)
INIT = Frame("init_process_group", f"{SITE}/torch/distributed/distributed_c10d.py", 1800)
LOADER = Frame("_BaseDataLoaderIter.__next__", f"{SITE}/torch/utils/data/dataloader.py", 725)
FETCH = Frame("_MapDatasetFetcher.fetch", f"{SITE}/torch/utils/data/_utils/fetch.py", 54)
WORKER_LOOP = Frame("_worker_loop", f"{SITE}/torch/utils/data/_utils/worker.py", 320)
POLL = Frame("_poll", "/usr/lib/python3.11/multiprocessing/connection.py", 257)
WAIT = Frame("Condition.wait", "/usr/lib/python3.11/threading.py", 320)
PIPELINE = Frame(
    "BatchPipeline.next", "/venv/lib/python3.11/site-packages/footplate/data/pipeline/batch_pipeline.py", 99
)
LOOP = Frame("TrainingLoop.epoch", f"{SITE}/footplate/training/loop.py", 145)
SAVING = Frame("save", f"{SITE}/footplate/checkpoint/saver.py", 50)
FSYNC = Frame("write", f"{SITE}/footplate/checkpoint/files.py", 9)
BOOTSTRAP = Frame("main", f"{SITE}/footplate/launch/bootstrap.py", 83)
MAIN = Frame("<module>", "/home/me/train.py", 80)
TRANSFORM = Frame("Flowers.transform", "/home/me/flowers.py", 31)
STEP = Frame("Net.training_step", "/home/me/net.py", 12)
OPEN = Frame("open", f"{SITE}/PIL/Image.py", 3000)


def rank(
    *frames: Frame, number: int = 1203, age_s: float = 41.2, idle_s: float | None = None, state: State = "asleep",
    group: str = "default_pg", threads: tuple[Thread, ...] = (), children: tuple[Process, ...] = (),
    operation: str = "all_reduce", completed: bool = False,
) -> Process:  # fmt: skip
    main = (Thread("MainThread", True, frames),) if frames else ()
    collectives = (Collective(group, operation, number, age_s, completed),) if number else ()
    return Process(
        7, "python", state, "", "answer", main + threads, (), collectives, idle_s, 0, 4, children
    )  # fmt: skip


def loader_worker(*frames: Frame, state: State = "asleep", pid: int = 712) -> Process:
    return Process(pid, "python", state, threads=(Thread("MainThread", True, frames),) if frames else ())


WAITS = rank(C10D, WRAPPER, LOOP, MAIN, number=1204)
IN_BACKWARD = rank(BACKWARD, LOOP, MAIN, number=1204)
TRANSFORMS = rank(TRANSFORM, FETCH, LOADER, LOOP, MAIN)


def test_the_sentence_of_the_task() -> None:
    assert explain({0: WAITS, 1: IN_BACKWARD, 2: WAITS, 3: TRANSFORMS}) == (
        "rank 3 is in its data loader's `Flowers.transform` (/home/me/flowers.py:31) since 41 s; "
        "ranks 0, 1 and 2 wait for it in all_reduce 1,204"
    )


@pytest.mark.parametrize(
    ("process", "text"),
    [
        (TRANSFORMS, "is in its data loader's `Flowers.transform` (/home/me/flowers.py:31)"),
        (
            rank(OPEN, TRANSFORM, PIPELINE, LOOP, MAIN),
            "is in its data loader's `Flowers.transform` (/home/me/flowers.py:31), which is in open",
        ),
        (rank(STEP, LOOP, MAIN), "is in `Net.training_step` (/home/me/net.py:12)"),
        (rank(WAIT, STEP, LOOP, MAIN), "is in `Net.training_step` (/home/me/net.py:12), which is in Condition.wait"),
        (rank(STEP, SAVING, LOOP, MAIN), "writes a checkpoint, in `Net.training_step` (/home/me/net.py:12)"),
        (
            rank(WAIT, SAVING, LOOP, threads=(Thread("footplate-writes", False, (FSYNC,)),)),
            "waits for its checkpoint: the thread footplate-writes writes a checkpoint, in `write` "
            f"({SITE}/footplate/checkpoint/files.py:9)",
        ),
        (
            rank(
                POLL, LOADER, LOOP,
                children=(loader_worker(POLL, WORKER_LOOP), loader_worker(TRANSFORM, FETCH, WORKER_LOOP)),
            ),
            "waits for its data loader's worker (process 712), which is in its data loader's `Flowers.transform` "
            "(/home/me/flowers.py:31)",
        ),
        (
            rank(POLL, LOADER, LOOP, children=(loader_worker(POLL, WORKER_LOOP, state="stopped"),)),
            "waits for its data loader's worker (process 712), which is stopped (SIGSTOP): it can't answer before it gets "
            "SIGCONT",
        ),
        (
            rank(POLL, LOADER, LOOP, children=(loader_worker(), loader_worker(pid=713))),
            "waits for its data loader's workers (process 712 and 713), whose stack can't be read: install py-spy to see "
            "it",
        ),
        (
            rank(WAIT, PIPELINE, LOOP, threads=(Thread("footplate-feed", False, (TRANSFORM, PIPELINE)),)),
            "waits for its data loader, whose thread footplate-feed is in its data loader's `Flowers.transform` "
            "(/home/me/flowers.py:31)",
        ),
        (rank(WAIT, WAIT, BOOTSTRAP), "has done its work, and waits for the other ranks to end"),
        (rank(INIT, LOOP), "waits until the other ranks join"),
        (rank(C10D, LOOP, number=0), "waits in all_reduce"),
        (rank(state="stopped"), "is stopped (SIGSTOP): it can't answer before it gets SIGCONT"),
        (
            rank(STEP, LOOP, state="uninterruptible"),
            "is in the kernel and can't be interrupted, as with a disk or a network file system that hangs; it is in "
            "`Net.training_step` (/home/me/net.py:12)",
        ),
        (rank(), "did not answer, and its stack can't be read: install py-spy to see it"),
        (
            rank(BACKWARD, LOOP, MAIN, state="running"),
            "is in `<module>` (/home/me/train.py:80), which is in _engine_run_backward",
        ),
        (
            rank(C10D, LOOP, MAIN, completed=True, state="running"),
            "is in `<module>` (/home/me/train.py:80), which is in all_reduce",
        ),
    ],
)  # fmt: skip
def test_where_a_rank_is(process: Process, text: str) -> None:
    assert where(process).text == text


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ({}, ""),
        (
            {0: TRANSFORMS, 1: TRANSFORMS},
            "ranks 0 and 1 are in their data loader's `Flowers.transform` (/home/me/flowers.py:31) since 41 s",
        ),
        (
            dict.fromkeys(range(8), WAITS) | {8: rank(STEP)},
            "rank 8 is in `Net.training_step` (/home/me/net.py:12) since 41 s; ranks 0-7 wait for it in all_reduce 1,204",
        ),
        (
            {0: WAITS, 1: WAITS},
            "ranks 0 and 1 wait in all_reduce 1,204 since 41 s: all ranks have called it, so the network between them is "
            "broken or slow",
        ),
        (
            {0: rank(C10D, MAIN, number=12), 1: rank(C10D, LOOP, number=11, operation="barrier")},
            "rank 0 waits in all_reduce 12, called by `<module>` (/home/me/train.py:80), since 41 s; rank 1 waits in "
            "barrier 11 since 41 s: the ranks call different collectives, so they wait for each other. Rank 1 hasn't "
            "called all_reduce 12",
        ),
        (
            {0: rank(INIT, LOOP, number=0), 1: rank(INIT, LOOP, number=0)},
            "ranks 0 and 1 wait in the setup of torch.distributed, until all ranks join: a rank is missing, or can't be "
            "reached",
        ),
        # A rank that sleeps in its backward pass, and has called fewer collectives, is the one that is late.
        (
            {0: WAITS, 1: rank(BACKWARD, STEP, LOOP, number=1203)},
            "rank 1 is in `Net.training_step` (/home/me/net.py:12), which is in _engine_run_backward since 41 s; rank 0 "
            "waits for it in all_reduce 1,204",
        ),
        ({0: rank(C10D, LOOP, number=5, group="hosts"), 1: rank(STEP, idle_s=3.0)},
         "rank 1 is in `Net.training_step` (/home/me/net.py:12) since 3 s; rank 0 waits for it in all_reduce 5 of the "
         "process group 'hosts'"),
    ],
)  # fmt: skip
def test_which_ranks_wait_for_which(ranks: dict[int, Process], sentence: str) -> None:
    assert explain(ranks) == sentence


def test_a_late_rank_never_counts_as_waiting() -> None:
    late = rank(C10D, LOOP, number=1204, state="stopped")
    assert explain({0: WAITS, 1: late}, late=[1]).endswith("; rank 0 waits for it in all_reduce 1,204")
    assert explain({0: rank(STEP), 1: late}, late=[1]).startswith("rank 1 is stopped (SIGSTOP)")
    assert explain({0: WAITS}, late=[1]) == "rank 1 did not answer; rank 0 waits for it in all_reduce 1,204"


def test_a_process_without_ranks_is_explained_by_its_id() -> None:
    assert explain_alone(rank(STEP, number=0, idle_s=50.4)) == (
        "process 7 is in `Net.training_step` (/home/me/net.py:12) since 50 s"
    )


def test_a_rank_has_moved_if_its_calls_or_collectives_differ() -> None:
    later = rank(TRANSFORM, FETCH, LOADER, LOOP, MAIN, age_s=46.2)
    assert unchanged({0: WAITS, 1: TRANSFORMS}, {0: WAITS, 1: later}, 5.0)
    assert not unchanged({0: WAITS}, {0: WAITS, 1: TRANSFORMS}, 5.0)
    assert not unchanged({0: WAITS}, {0: IN_BACKWARD}, 5.0)
    assert not unchanged({0: WAITS}, {0: rank(C10D, WRAPPER, LOOP, MAIN, number=1205)}, 5.0)


def test_a_rank_has_moved_if_it_has_made_progress_though_its_calls_are_the_same() -> None:
    before = {0: rank(STEP, LOOP, MAIN, idle_s=0.1)}
    assert not unchanged(before, {0: rank(STEP, LOOP, MAIN, idle_s=4.9)}, 5.0)
    assert unchanged(before, {0: rank(STEP, LOOP, MAIN, idle_s=5.1)}, 5.0)


FRAMES = st.sampled_from([
    C10D, WRAPPER, BACKWARD, INIT, LOADER, FETCH, WORKER_LOOP, POLL, WAIT, PIPELINE, LOOP, SAVING, MAIN, TRANSFORM, STEP,
    OPEN,
])  # fmt: skip
STACKS = st.lists(FRAMES, max_size=5)
STATES = st.sampled_from(get_args(State))


@st.composite
def any_rank(draw: st.DrawFn) -> Process:
    workers = draw(
        st.lists(st.builds(lambda frames, state: loader_worker(*frames, state=state), STACKS, STATES), max_size=2)
    )
    helpers = draw(st.lists(st.builds(lambda frames: Thread("footplate-x", False, tuple(frames)), STACKS), max_size=2))
    return rank(
        *draw(STACKS), number=draw(st.integers(0, 3)), state=draw(STATES), threads=tuple(helpers), children=tuple(workers),
        group=draw(st.sampled_from(["default_pg", "hosts", "a/b"])), completed=draw(st.booleans()),
    )  # fmt: skip


@given(st.dictionaries(st.integers(0, 20), any_rank(), min_size=1, max_size=6), st.sets(st.integers(0, 20), max_size=2))
def test_each_rank_is_in_the_sentence_once_whatever_the_stacks_are(ranks: dict[int, Process], late: set[int]) -> None:
    sentence = explain(ranks, late)

    named = []
    for clause in re.findall(r"(?:^|; )ranks? ([\d, and-]+?) (?!\d|and)", sentence.split(": the ranks call")[0]):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", clause):
            named += range(int(first), int(last or first) + 1)
    assert sorted(named) == sorted(ranks.keys() | late)
    assert "\n" not in sentence
