"""The event queue between training and its uploader."""

import json

from hypothesis import given
from hypothesis import strategies as st

from footplate.tracking import event_queue
from footplate.tracking.event_queue import Progress

records = st.lists(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False) | st.text(max_size=5)), max_size=8)


@given(records=records, torn=st.integers(1, 30))
def test_a_reader_gets_every_complete_record_and_never_a_torn_one(tmp_path_factory, records, torn):
    path = event_queue.next_queue(tmp_path_factory.mktemp("run"))
    event_queue.append(path, records)
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(json.dumps({"torn": "x" * 30}).encode()[:torn])
    read = list(event_queue.read(path, 0))
    assert [record for record, _ in read] == records
    assert [position for _, position in read][-1:] in ([], [whole])
    for index, (_, position) in enumerate(read):
        assert [record for record, _ in event_queue.read(path, position)] == records[index + 1 :]


def test_each_attempt_gets_a_queue_that_sorts_after_the_older(run_dir):
    paths = []
    for _ in range(3):
        paths.append(event_queue.next_queue(run_dir))
        paths[-1].touch()
    assert event_queue.pending(run_dir) == paths
    assert event_queue.first_record(paths[0]) is None


def test_progress_survives_the_process(run_dir):
    path = event_queue.next_queue(run_dir)
    progress = Progress(key="k", run_id="r", error="down", dropped=("x",)).at(path, 10)
    progress.save(run_dir)
    assert Progress.load(run_dir) == Progress("k", "r", {path.name: 10}, None, ("x",))
    assert progress.without(path).delivered == {}
