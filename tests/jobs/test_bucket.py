"""A job whose directory is in a bucket: it is killed, and continues from its checkpoint in the bucket.

`backends/test_conformance.py` has a job that continues from a bucket of Google's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from object_storage import own_bucket

from footplate import checkpoint
from footplate.checkpoint.storage import to_place
from footplate.jobs.states import State
from jobs.conftest import Bench
from jobs.test_running import TRAINS, curve

pytestmark = pytest.mark.engine


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a directory in a bucket, on a server of its own."""
    with own_bucket("s3", monkeypatch) as uri:
        yield uri


def test_it_is_killed_and_continues_from_its_newest_checkpoint_there_and_says_nothing_of_it(bench: Bench, bucket: str):
    bench.program("")
    (bench.directory / "trainer" / "task.py").write_text(TRAINS)
    bench.submit(args=(str(bench.directory), "process"), job_dir=bucket)
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt) == (State.SUCCEEDED, 2), job.cause
    first, second = curve(bench, 1), curve(bench, 2)
    begun = min(map(int, second))
    assert begun in (3, 5)  # after the checkpoint of step 2 or 4
    assert list(second) == [str(step) for step in range(begun, 11)]
    assert all(first[step] == second[step] for step in first.keys() & second.keys())
    assert checkpoint.load(to_place(f"{bucket}/checkpoints/last.ckpt"))["progress"]["global_step"] == 10
    assert not list(bench.directory.rglob("meta.json"))
    assert [path.name for path in (bench.directory / "runs").iterdir()] == ["my_job"]
