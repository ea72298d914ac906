"""The spool between training and its courier."""

import json

from hypothesis import given
from hypothesis import strategies as st

from footplate.tracking import spool
from footplate.tracking.spool import Progress

records = st.lists(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False) | st.text(max_size=5)), max_size=8)


@given(records=records, torn=st.integers(1, 30))
def test_a_reader_gets_every_complete_record_and_never_a_torn_one(tmp_path_factory, records, torn):
    path = spool.next_spool(tmp_path_factory.mktemp("run"))
    spool.append(path, records)
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(json.dumps({"torn": "x" * 30}).encode()[:torn])
    read = list(spool.read(path, 0))
    assert [record for record, _ in read] == records
    assert [position for _, position in read][-1:] in ([], [whole])
    for index, (_, position) in enumerate(read):
        assert [record for record, _ in spool.read(path, position)] == records[index + 1 :]


def test_each_attempt_gets_a_spool_that_sorts_after_the_older(run_dir):
    paths = []
    for _ in range(3):
        paths.append(spool.next_spool(run_dir))
        paths[-1].touch()
    assert spool.pending(run_dir) == paths
    assert spool.first_record(paths[0]) is None


def test_progress_survives_the_process(run_dir):
    path = spool.next_spool(run_dir)
    progress = Progress(key="k", run_id="r", error="down", dropped=("x",)).at(path, 10)
    progress.save(run_dir)
    assert Progress.load(run_dir) == Progress("k", "r", {path.name: 10}, None, ("x",))
    assert progress.without(path).delivered == {}
