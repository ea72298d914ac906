"""Checkpoints in S3, Google Cloud Storage and Azure, against real servers on loopback: killed, refused, cut off."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models.small import Classifier, loader
from object_storage import Bucket

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.by_parts import load_by_parts
from footplate.checkpoint.conversion import convert
from footplate.checkpoint.inspection import inspect
from footplate.checkpoint.storage import RemotePath, objects, store_of, to_place
from footplate.checkpoint.writer import CheckpointWriter

from ..killed import reports_of_killed

pytestmark = pytest.mark.engine


@pytest.fixture
def s3(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"{s3_bucket.use(monkeypatch)}/{uuid.uuid4().hex}"


@pytest.fixture
def gcs(gcs_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"{gcs_bucket.use(monkeypatch)}/{uuid.uuid4().hex}"


@pytest.fixture
def azure(azure_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"{azure_bucket.use(monkeypatch)}/{uuid.uuid4().hex}"


@pytest.fixture(params=["s3", "gcs", "azure"])
def remote(request: pytest.FixtureRequest) -> str:
    """A directory on each service."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after seconds rather than minutes. pyarrow waits for longer before each attempt, so it makes two."""
    monkeypatch.setattr(objects, "DELAYS_S", (0.1,) * 6)
    monkeypatch.setattr(objects, "_ATTEMPTS", 2)


def write(uri: str, **state: Any) -> str:
    checkpoint.save({"state_dict": {}, **state}, uri, {})
    return uri


def names(uri: str) -> list[str]:
    """All objects below a URI; state files without their unique part."""
    place = to_place(uri)
    listed = store_of(place)._list(place)
    return sorted("state" if "/state" in name and "ckpt" not in name.rpartition("/")[2] else name for name in listed)


def put(uri: str, content: bytes = b"half") -> None:
    place = to_place(uri)
    store_of(place)._put(place, content)


def states(uri: str) -> int:
    place = to_place(uri)
    return sum(name.endswith(".safetensors") for name in store_of(place)._list(place))


def test_what_goes_up_comes_down_bit_for_bit(remote):
    weights = torch.randn(700, 900)  # large enough for several requests with smaller pieces
    write(f"{remote}/a.ckpt", w=weights, n=(1, "two"), empty=torch.empty(0, 3))
    state = checkpoint.load(f"{remote}/a.ckpt")
    assert torch.equal(state["w"], weights)
    assert (state["n"], tuple(state["empty"].shape)) == ((1, "two"), (0, 3))


@pytest.mark.slow
def test_a_large_state_goes_up_in_parts_and_takes_little_memory(s3, tmp_path):
    script = tmp_path / "large.py"
    script.write_text(
        textwrap.dedent("""
            import re, sys, torch
            from footplate import checkpoint
            from footplate.checkpoint.format import statefile
            from footplate.checkpoint.storage import store_of, to_place

            def peak():
                return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024

            place = to_place(sys.argv[1])
            store_of(place).write(to_place(sys.argv[1] + "0"), statefile.freeze({"state_dict": {}}), {})
            frozen = statefile.freeze({"state_dict": {"w": torch.arange(36 << 20, dtype=torch.int32)}})
            open("/proc/self/clear_refs", "w").write("5")  # the peak is now: it was higher when the state was frozen
            before = peak()
            store_of(place).write(place, frozen, {})
            print(peak() - before)
        """)
    )
    done = subprocess.run([sys.executable, script, f"{s3}/a.ckpt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 130, "MB beyond the state's own 144"
    tensor = checkpoint.load(f"{s3}/a.ckpt")["state_dict"]["w"]
    assert torch.equal(tensor, torch.arange(36 << 20, dtype=torch.int32))


def test_the_newest_complete_one_is_found_and_litter_is_not(remote):
    assert checkpoint.newest([remote]) is None
    for name in ("b", "c", "sub/a"):
        write(f"{remote}/{name}.ckpt")
    put(f"{remote}/d.ckpt/state-1.safetensors")
    assert str(checkpoint.newest([remote])) == f"{remote}/sub/a.ckpt"
    assert not checkpoint.is_complete(f"{remote}/d.ckpt")
    with pytest.raises(fp.CheckpointError, match=r'd\.ckpt is not a complete checkpoint.*"?b\.ckpt'):
        checkpoint.load(f"{remote}/d.ckpt")
    with pytest.raises(fp.CheckpointError, match=r"There is no checkpoint at .*nothing\.ckpt"):
        checkpoint.load(f"{remote}/nothing.ckpt")


def test_a_pointer_stands_for_a_checkpoint(remote):
    for number in (1, 2):
        write(f"{remote}/{number}.ckpt", x=number)
        checkpoint.point(f"{remote}/last.ckpt", f"{remote}/{number}.ckpt")
    assert checkpoint.load(f"{remote}/last.ckpt")["x"] == 2
    assert [path.name for path in store_of(to_place(remote)).find(to_place(remote))] == ["1.ckpt", "2.ckpt"]


def test_writing_again_replaces_and_leaves_one_state(remote):
    for number in (1, 2):
        write(f"{remote}/a.ckpt", x=number)
    assert checkpoint.load(f"{remote}/a.ckpt")["x"] == 2
    assert states(remote) == 1


def test_deleting_leaves_nothing(remote):
    write(f"{remote}/a.ckpt")
    write(f"{remote}/b.ckpt")
    checkpoint.delete(f"{remote}/a.ckpt")
    checkpoint.delete(f"{remote}/never-there.ckpt")
    assert not any("a.ckpt" in name for name in names(remote))
    assert checkpoint.is_complete(f"{remote}/b.ckpt")


def test_what_killed_uploads_and_deletions_leave_is_swept_and_nothing_else(remote):
    write(f"{remote}/whole.ckpt", x=1)
    write(f"{remote}/cut.ckpt")
    place = to_place(f"{remote}/cut.ckpt")
    store_of(place)._remove(place / checkpoint.META)  # a deletion that was killed
    put(f"{remote}/whole.ckpt/state-2.safetensors")  # a replacement that was killed
    put(f"{remote}/new.ckpt/state-3.safetensors")  # a first write that was killed
    put(f"{remote}/mine/notes.txt")
    checkpoint.clean_up(remote)
    left = [name for name in names(remote) if name != "state"]
    assert left == ["mine/notes.txt", "whole.ckpt/meta.json"]
    assert checkpoint.load(f"{remote}/whole.ckpt")["x"] == 1


def test_a_damaged_object_is_refused(s3):
    write(f"{s3}/a.ckpt", w=torch.zeros(1000))
    store, place = store_of(to_place(s3)), to_place(f"{s3}/a.ckpt")
    file = store._file(place, checkpoint.STATE)
    content = bytearray(store._get(file))
    store._put(file, bytes(content[:-1] + b"\x01"))
    with pytest.raises(fp.CheckpointError, match="the checksum of"):
        checkpoint.load(f"{s3}/a.ckpt")
    store._put(file, bytes(content[:-1]))
    with pytest.raises(fp.CheckpointError, match=r"is damaged: state\.safetensors has"):
        checkpoint.load(f"{s3}/a.ckpt")


def test_a_copy_of_a_local_checkpoint_is_one(s3, tmp_path):
    checkpoint.save({"state_dict": {}, "x": 7}, tmp_path / "a.ckpt", {})
    for file in (tmp_path / "a.ckpt").iterdir():
        put(f"{s3}/a.ckpt/{file.name}", file.read_bytes())
    assert checkpoint.load(f"{s3}/a.ckpt")["x"] == 7
    checkpoint.clean_up(s3)
    assert checkpoint.load(f"{s3}/a.ckpt")["x"] == 7


def test_checkpoints_are_looked_into_copied_and_converted_there(remote, tmp_path):
    checkpoint.save({"state_dict": {"w": torch.arange(3.0)}, "epoch": 2}, tmp_path / "a.ckpt", {"epoch": 2})
    with pytest.raises(fp.CheckpointError, match="holds weights alone"):
        convert(tmp_path / "a.ckpt", f"{remote}/a.ckpt")
    state = checkpoint.load(tmp_path / "a.ckpt") | {"footplate": {"format": 1}, "global_step": 9}
    checkpoint.save(state, tmp_path / "b.ckpt", {"epoch": 2})
    convert(tmp_path / "b.ckpt", f"{remote}/b.ckpt")
    checkpoint.point(f"{remote}/last.ckpt", f"{remote}/b.ckpt")
    for path in (remote, f"{remote}/last.ckpt"):
        (info,) = inspect(path, verify=True)
        assert (info.path, info.fault, info.verified) == (f"{remote}/b.ckpt", "", True)
        assert (info.epoch, info.global_step, info.weights) == (2, 9, {"float32": 3})
    for name in ("w.safetensors", "w.pt"):
        convert(f"{remote}/last.ckpt", f"{remote}/{name}")
        with pytest.raises(fp.ConfigError, match="--force"):
            convert(f"{remote}/last.ckpt", f"{remote}/{name}")
    place = to_place(remote)
    content = store_of(place)._get(place / "w.safetensors")
    assert safetensors.torch.load(content)["w"].tolist() == [0, 1, 2]
    assert checkpoint.load(f"{remote}/w.pt")["state_dict"]["w"].tolist() == [0, 1, 2]
    with pytest.raises(fp.CheckpointError, match="There is nothing at"):
        inspect(f"{remote}/nothing")


# Training


def weights(module: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def test_a_run_keeps_its_checkpoints_there_and_continues_from_them(remote, make_trainer):
    def run(epochs: int, ckpt_path: str | None, where: str) -> tuple[fp.Trainer, Classifier]:
        torch.manual_seed(0)
        model = Classifier()
        saver = fp.ModelCheckpoint(where, monitor="val_loss", mode="max", filename="{epoch}")
        trainer = make_trainer(max_epochs=epochs, callbacks=[saver])
        trainer.fit(model, loader(), loader(20), ckpt_path=ckpt_path)
        return trainer, model

    _, whole = run(4, None, f"{remote}/whole")
    run(2, "last", f"{remote}/cut")
    made, resumed = run(4, "last", f"{remote}/cut")
    assert weights(resumed) == weights(whole)
    saver = made.checkpoint_callback
    assert isinstance(saver.dirpath, RemotePath)
    assert states(f"{remote}/cut") == len({saver.best_model_path, saver.last_model_path})
    assert checkpoint.load(f"{remote}/cut/last.ckpt")["progress"]["epoch"] == 3

    assert made.test(None, loader(20))  # the best, by itself
    assert make_trainer().test(Classifier(), loader(20), ckpt_path=f"{remote}/cut/best.ckpt")
    assert weights(Classifier.load_from_checkpoint(f"{remote}/cut/last.ckpt")) == weights(whole)
    resumed = make_trainer(max_epochs=5)
    resumed.fit(Classifier(), loader(), loader(20), ckpt_path=f"{remote}/cut/last.ckpt")
    assert resumed.global_step == 60


def test_a_runs_own_directory_is_on_this_machine(make_trainer):
    with pytest.raises(fp.ConfigError, match=r'ModelCheckpoint\(dirpath="s3://lake/run/checkpoints"\)'):
        make_trainer(default_root_dir="s3://lake/run")


def test_a_bucket_that_is_not_there_is_said_before_training(s3, make_trainer):
    trainer = make_trainer(callbacks=[fp.ModelCheckpoint("s3://no-such-bucket/run")])
    with pytest.raises(fp.ConfigError, match=r"s3://no-such-bucket/run can't be written to.*NO_SUCH_BUCKET"):
        trainer.fit(Classifier(), loader())
    assert trainer.global_step == 0


# Killed


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["new names", "same"])
def test_killed_at_any_moment_of_an_upload_what_is_left_is_whole(mode, s3):
    for reported in reports_of_killed(s3, mode, kills=4, within_s=0.3):
        checkpoint.clean_up(s3)
        state = checkpoint.load(checkpoint.newest([s3]))
        assert state["state_dict"]["w"].eq(state["number"]).all()
        assert state["number"] >= reported[-1], "a checkpoint that had been reported complete is gone"
        assert states(s3) == sum(name.endswith("meta.json") for name in names(s3)), "litter"


# A service that fails


class Flaky:
    """A connection to S3 that breaks at random (`percent` of the requests), or as long as it is `down`."""

    def __init__(self, target: int) -> None:
        self.target, self.down, self.percent, self.broken = target, False, 0, 0
        self._random = random.Random(1)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.target)) as server, contextlib.suppress(OSError):
            while True:
                for end in select.select([client, server], [], [], 0.1)[0]:
                    content = end.recv(1 << 16)
                    if not content:
                        return
                    if self.down or self._random.uniform(0, 100) < self.percent:
                        self.broken += 1
                        return
                    (server if end is client else client).sendall(content)


@pytest.fixture
def flaky(s3: str, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flaky]:
    wire = Flaky(s3_bucket.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    yield wire
    wire.close()


@pytest.mark.slow
def test_requests_that_fail_now_and_then_are_made_again(flaky, s3, quickly):
    flaky.percent = 7
    for number in range(3):
        write(f"{s3}/{number}.ckpt", x=torch.full((1000,), number))
        assert checkpoint.load(f"{s3}/{number}.ckpt")["x"].eq(number).all()
    assert flaky.broken > 2


@pytest.mark.slow
def test_a_service_that_is_down_for_a_while_is_waited_for(flaky, s3):
    writer = CheckpointWriter()
    flaky.down = True
    writer.save({"state_dict": {"w": torch.ones(10)}}, f"{s3}/a.ckpt", {})  # for which training doesn't wait
    threading.Timer(1.5, setattr, (flaky, "down", False)).start()
    writer.wait()
    assert checkpoint.load(f"{s3}/a.ckpt")["state_dict"]["w"].sum() == 10
    assert flaky.broken


@pytest.mark.slow
def test_a_service_that_stays_away_ends_training_as_a_full_disk_does_and_the_older_checkpoint_is_whole(
    flaky, s3, make_trainer, quickly
):
    class GoesDown(fp.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.run.writer.wait()
            flaky.down = trainer.current_epoch == 2

    trainer = make_trainer(max_epochs=6, callbacks=[GoesDown(), fp.ModelCheckpoint(s3, filename="{epoch}")])
    with pytest.raises(fp.CheckpointError, match=r"epoch=2\.ckpt.*could not be written"):
        trainer.fit(Classifier(), loader())
    flaky.down = False
    assert checkpoint.newest([s3]).name == "epoch=1.ckpt"
    resumed = make_trainer(max_epochs=3, callbacks=[fp.ModelCheckpoint(s3, filename="{epoch}")])
    resumed.fit(Classifier(), loader(), ckpt_path="last")
    assert resumed.global_step == 36


@pytest.mark.parametrize("uri", ["s3://b/x", "s3:/b/x", "gs://b/x/", "s3a://b/x"])
def test_a_uri_is_known_even_after_it_has_been_a_path(uri):
    for given in (uri, Path(uri)):
        place = to_place(given)
        assert isinstance(place, RemotePath)
        assert (place.name, str(place / "y")) == ("x", f"{place.uri}/y")
        assert "://b/" in str(place)


def test_parts_of_tensors_are_read_from_a_bucket(remote):
    torch.manual_seed(0)
    weights = torch.nn.Linear(512, 1024).state_dict()
    path = write(f"{remote}/run.ckpt", state_dict=weights)
    part = torch.empty(3, 100)
    load_by_parts(path)["state_dict"]["weight"].read_into(part, (700, 412))
    assert torch.equal(part, weights["weight"][700:703, 412:])

    linear = torch.nn.Linear(512, 1024)
    fp.load_pretrained(linear, path)
    assert all(torch.equal(value, weights[name]) for name, value in linear.state_dict().items())
