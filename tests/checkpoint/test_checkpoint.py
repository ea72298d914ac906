"""Broken checkpoints: killed, truncated, forged, on a full disk. The remaining checkpoints are always complete."""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import shlex
import subprocess
import sys
import textwrap
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.small import Classifier, loader

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.writer import CheckpointWriter

from .killed import reports_of_killed


def write(path: Path, **state) -> Path:
    checkpoint.save({"state_dict": {}, **state}, path, {})
    return path


def roundtrip(path: Path, value):
    return checkpoint.load(write(path, value=value))["value"]


# What goes in comes out

keys = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
trees = st.recursive(
    leaves | st.sets(st.integers()) | st.sets(st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(trees)
def test_nested_plain_values_come_back_as_they_were(tmp_path, tree):
    assert roundtrip(tmp_path / "a.ckpt", tree) == tree


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_tensors_of_every_type_come_back_bit_for_bit(dtype, tmp_path):
    tensor = (torch.rand(3, 4) * 5).to(dtype)
    for view in (tensor, tensor.T, tensor[:, ::2], tensor[0, 0], tensor[:0]):
        back = roundtrip(tmp_path / "a.ckpt", view)
        assert back.dtype == dtype
        assert torch.equal(back, view)


def test_arrays_sets_and_paths_come_back_wherever_they_are(tmp_path):
    value = {"pair": ({1, 2}, np.arange(3)), "list": [np.float32(0.5)], "path": Path("a") / "b"}
    back = roundtrip(tmp_path / "a.ckpt", value)
    assert back["pair"][0] == {1, 2}
    assert back["pair"][1].tolist() == [0, 1, 2]
    assert back["list"] == [0.5]
    assert back["path"] == "a/b"


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(("key", "plain"), [(Colour.RED, "red"), (np.str_("a"), "a"), (np.float64(1.5), 1.5)])
def test_keys_that_are_nearly_plain_are_made_plain(key, plain, tmp_path):
    assert roundtrip(tmp_path / "a.ckpt", {key: Colour.RED}) == {plain: "red"}


def test_any_reader_of_safetensors_finds_the_tensors_under_their_paths(tmp_path):
    weights = {"net.weight": torch.randn(3, 4), "net.bias": torch.ones(4, dtype=torch.bfloat16)}
    checkpoint.save({"state_dict": weights, "flags": [torch.tensor([True, False])]}, tmp_path / "a.ckpt", {})
    tensors = safetensors.torch.load_file(tmp_path / "a.ckpt" / checkpoint.STATE)
    assert tensors.keys() == {"state_dict.net.weight", "state_dict.net.bias", "flags[0]"}
    assert all(torch.equal(tensors[f"state_dict.{name}"], weight) for name, weight in weights.items())


def test_weights_that_are_tied_are_written_once(tmp_path):
    weight = torch.randn(64, 64)
    path = write(tmp_path / "a.ckpt", embedding=weight, head=weight)
    assert (path / checkpoint.STATE).stat().st_size < 2 * weight.nbytes
    assert torch.equal(checkpoint.load(path)["head"], weight)


def test_the_memory_format_of_images_weights_is_kept(tmp_path):
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    back = roundtrip(tmp_path / "a.ckpt", weight)
    assert back.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back, weight)


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.eye(3).to_sparse(), "sparse_coo tensor"), (torch.empty(2, device="meta"), "on the meta device")],
)
def test_a_tensor_that_is_no_plain_memory_is_refused_by_its_path(value, said, tmp_path):
    with pytest.raises(fp.CheckpointError, match=rf"^value: .*{said}"):
        write(tmp_path / "a.ckpt", value=value)


def test_a_state_that_changes_its_shapes_between_saves_is_saved_right(tmp_path):
    writer = CheckpointWriter()
    for size in (1, 1000, 10):
        writer.save(
            {"state_dict": {"w": torch.full((size,), float(size))}, "n": torch.ones(2)}, tmp_path / "a.ckpt", {}
        )
        writer.wait()
        assert checkpoint.load(tmp_path / "a.ckpt")["state_dict"]["w"].tolist() == [float(size)] * size


def test_tensors_whose_paths_look_alike_are_kept_apart(tmp_path):
    value = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, 1: torch.full((2,), 2.0), "1": torch.full((2,), 3.0)}
    back = roundtrip(tmp_path / "a.ckpt", value)
    assert [back["a.b"][0].item(), back["a"]["b"][0].item(), back[1][0].item(), back["1"][0].item()] == [0, 1, 2, 3]


def test_a_value_that_would_need_code_is_refused_by_its_path_when_saving(tmp_path):
    with pytest.raises(fp.CheckpointError, match=r"^callbacks\.mine\[1\]: a .*Classifier can't be saved"):
        write(tmp_path / "a.ckpt", callbacks={"mine": [1, Classifier()]})
    with pytest.raises(fp.CheckpointError, match="the key"):
        write(tmp_path / "a.ckpt", callbacks={(1, 2): 3})
    assert not list(tmp_path.iterdir())


def test_what_is_saved_is_the_state_at_the_call_not_what_it_became(tmp_path):
    writer = CheckpointWriter()
    tensor, numbers = torch.zeros(1 << 16), [1]
    writer.save({"state_dict": {"w": tensor}, "numbers": numbers}, tmp_path / "a.ckpt", {})
    tensor.fill_(7)
    numbers.append(2)
    writer.wait()
    state = checkpoint.load(tmp_path / "a.ckpt")
    assert not state["state_dict"]["w"].any()
    assert state["numbers"] == [1]


def test_a_second_save_waits_for_the_first_and_uses_its_buffers(tmp_path):
    writer = CheckpointWriter()
    tensor = torch.zeros(1 << 16)
    done: list[int] = []
    for number in range(3):
        tensor.fill_(number)
        path = tmp_path / f"{number}.ckpt"
        writer.save({"state_dict": {"w": tensor}}, path, {}, lambda number=number: done.append(number))
    writer.wait()
    assert done == [0, 1, 2]
    for number in range(3):
        assert checkpoint.load(tmp_path / f"{number}.ckpt")["state_dict"]["w"].eq(number).all()


# What is broken is refused, with one sentence


def test_a_truncated_state_is_refused(tmp_path):
    path = write(tmp_path / "a.ckpt", x=torch.zeros(1000))
    with (path / checkpoint.STATE).open("r+b") as file:
        file.truncate(500)
    assert not checkpoint.is_complete(path)
    assert checkpoint.newest([tmp_path]) is None
    with pytest.raises(fp.CheckpointError, match=r"a\.ckpt is damaged: state\.safetensors has 500 bytes instead of"):
        checkpoint.load(path)


def test_a_state_of_the_right_size_and_wrong_bytes_is_refused(tmp_path):
    path = write(tmp_path / "a.ckpt", x=torch.zeros(1000))
    file = path / checkpoint.STATE
    file.write_bytes(os.urandom(file.stat().st_size))
    with pytest.raises(fp.CheckpointError, match="damaged"):
        checkpoint.load(path)


@pytest.mark.parametrize("place", [9, 0.5, -1])
def test_one_flipped_bit_anywhere_is_refused(place, tmp_path):
    path = write(tmp_path / "a.ckpt", x=torch.zeros(1000))
    file = path / checkpoint.STATE
    content = bytearray(file.read_bytes())
    content[int(len(content) * place) if isinstance(place, float) else place] ^= 1
    file.write_bytes(content)
    with pytest.raises(fp.CheckpointError, match=r"damaged.*Nothing was loaded"):
        checkpoint.load(path)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"files": 3}'])
def test_without_a_readable_marker_there_is_no_checkpoint(content, tmp_path):
    whole, path = write(tmp_path / "whole.ckpt"), write(tmp_path / "hole.ckpt")
    (path / checkpoint.META).unlink()
    if content is not None:
        (path / checkpoint.META).write_text(content)
    assert checkpoint.newest([tmp_path]) == whole
    with pytest.raises(fp.CheckpointError, match=r'not a complete checkpoint.*Did you mean "whole\.ckpt"'):
        checkpoint.load(path)


def test_several_broken_ones_beside_each_other_are_each_refused(tmp_path):
    for name in "abc":
        (write(tmp_path / f"{name}.ckpt") / checkpoint.META).unlink()
    (tmp_path / "d.ckpt").write_bytes(b"a file")
    assert checkpoint.newest([tmp_path]) is None
    with pytest.raises(fp.CheckpointError, match=r"a\.ckpt is not a complete checkpoint"):
        checkpoint.load(tmp_path / "a.ckpt")


def test_a_missing_one_is_said_to_be_missing_with_its_neighbours(tmp_path):
    write(tmp_path / "epoch=1.ckpt")
    with pytest.raises(fp.CheckpointError, match=r'no checkpoint at .*Did you mean "epoch=1\.ckpt"'):
        checkpoint.load(tmp_path / "epoch=2.ckpt")
    with pytest.raises(fp.CheckpointError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "nowhere" / "epoch=2.ckpt")


class Harmful:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_file_whose_loading_would_run_code_is_refused_and_runs_none(tmp_path):
    for name, write_it in (
        ("torch", torch.save),
        ("pickle", lambda value, file: file.write_bytes(pickle.dumps(value))),
    ):
        file = tmp_path / f"{name}.ckpt"
        write_it({"state_dict": {}, "x": Harmful(tmp_path / "harm")}, file)
        with pytest.raises(fp.CheckpointError, match=r"can't be read: .*Nothing was loaded"):
            checkpoint.load(file)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04", b"not a checkpoint"])
def test_a_file_of_anything_else_is_refused(content, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(fp.CheckpointError, match=r"a\.ckpt can't be read"):
        checkpoint.load(tmp_path / "a.ckpt")


def test_a_file_without_weights_is_no_checkpoint(tmp_path):
    torch.save({"model": torch.zeros(1)}, tmp_path / "a.ckpt")
    with pytest.raises(fp.CheckpointError, match='no "state_dict"'):
        checkpoint.load(tmp_path / "a.ckpt")


# Killed while writing


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["new names", "same"])
def test_killed_at_any_moment_what_is_left_is_whole(mode, tmp_path):
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    for reported in reports_of_killed(str(directory), mode, kills=5, within_s=0.15):
        checkpoint.clean_up(directory)
        newest = checkpoint.newest([directory])
        assert newest is not None
        state = checkpoint.load(newest)
        assert state["state_dict"]["w"].eq(state["number"]).all()
        assert state["number"] >= reported[-1], "a checkpoint that had been reported complete is gone"
        litter = [path.name for path in directory.iterdir() if not checkpoint.is_complete(path)]
        assert all(name.endswith(".ckpt") for name in litter), litter


def test_litter_of_killed_writes_is_swept_and_a_cut_replacement_is_finished(tmp_path):
    whole = write(tmp_path / "whole.ckpt")
    (tmp_path / ".tmp-ckpt-abc").mkdir()
    (tmp_path / ".tmp-ckpt-abc" / "state.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-ckpt-link").symlink_to("nowhere")
    write(tmp_path / "a.ckpt").rename(tmp_path / ".old-a.ckpt")
    write(tmp_path / "b.ckpt", x=1)
    write(tmp_path / "c.ckpt", x=2).rename(tmp_path / ".old-b.ckpt")
    checkpoint.clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt", "whole.ckpt"]
    assert checkpoint.load(tmp_path / "b.ckpt")["x"] == 1
    assert checkpoint.is_complete(whole)


def test_a_run_sweeps_its_directory_when_it_begins(make_trainer, tmp_path):
    litter = tmp_path / "run" / "checkpoints" / ".tmp-ckpt-abc"
    litter.mkdir(parents=True)
    make_trainer(max_epochs=1).fit(Classifier(), loader())
    assert not litter.exists()


# Where it can't be written


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int):
    """A file system of a few megabytes. A process mounts it at `path` in its own namespaces, which needs no privileges."""
    path.mkdir()
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {shlex.quote(str(path))} && echo mounted && exec cat"
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    words = ["unshare", *user, "--mount", "sh", "-c", mount]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"mounted\n", (
            "this user may not mount a file system, even in a user namespace"
        )
        try:
            yield Path(f"/proc/{process.pid}/root{path}")
        finally:
            process.stdin.close()


FULL = """
    import resource, signal, sys, torch
    from pathlib import Path
    from footplate import CheckpointError, checkpoint
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    directory = Path(sys.argv[1])
    checkpoint.save({"state_dict": {}, "x": 1}, directory / "small.ckpt", {})
    try:
        checkpoint.save({"state_dict": {"w": torch.zeros(1 << 20)}}, directory / "large.ckpt", {})
    except CheckpointError as error:
        print(error)
"""


def test_a_file_that_may_not_grow_is_one_clear_error_and_leaves_no_litter(tmp_path):
    """The limit of a quota or of `ulimit`. It needs no privileges."""
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(FULL))
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    done = subprocess.run([sys.executable, script, directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "large.ckpt could not be written" in done.stdout
    assert [path.name for path in directory.iterdir()] == ["small.ckpt"]
    assert checkpoint.load(directory / "small.ckpt")["x"] == 1


def test_a_full_disk_is_said_plainly_and_the_older_checkpoint_stays(tmp_path):
    with small_disk(tmp_path / "disk", 3) as disk:
        older = write(disk / "older.ckpt", x=torch.zeros(1 << 16))
        with pytest.raises(fp.CheckpointError, match=r"The disk is full.*Earlier checkpoints are complete"):
            write(disk / "newer.ckpt", x=torch.zeros(1 << 20))
        assert checkpoint.newest([disk]) == older
        assert [path.name for path in disk.iterdir()] == ["older.ckpt"]
        write(disk / "newest.ckpt", x=torch.zeros(1 << 16))
        assert checkpoint.newest([disk]).name == "newest.ckpt"


def test_training_on_a_full_disk_ends_with_that_error_and_resumes_from_what_there_is(make_trainer, tmp_path):
    with small_disk(tmp_path / "disk", 3) as disk:
        root = disk / "run"

        def await_only(name: str) -> None:
            until = time.monotonic() + 60
            while sorted(path.name for path in (root / "checkpoints").iterdir()) != [name, "last.ckpt"]:
                assert time.monotonic() < until, list((root / "checkpoints").iterdir())
                time.sleep(0.01)

        class FillsUp(fp.Callback):
            def on_train_epoch_start(self, trainer, pl_module):
                if trainer.current_epoch == 2:
                    # The space of the first epoch's checkpoint would be enough for the third.
                    await_only("epoch=1-step=24.ckpt")
                    with contextlib.suppress(OSError), (disk / "ballast").open("wb") as file:
                        while True:
                            file.write(bytes(1 << 14))
                            file.flush()

        with pytest.raises(fp.CheckpointError, match="The disk is full"):
            make_trainer(default_root_dir=root, callbacks=[FillsUp()], max_epochs=6).fit(Classifier(), loader())
        (disk / "ballast").unlink()
        resumed = make_trainer(default_root_dir=root, max_epochs=6)
        resumed.fit(Classifier(), loader(), ckpt_path="last")
        assert resumed.global_step == 72


def test_a_failed_background_save_is_told_at_the_next_call(tmp_path):
    (tmp_path / "file").write_text("in the way")
    writer = CheckpointWriter()
    writer.save({"state_dict": {}}, tmp_path / "file" / "a.ckpt", {})
    with pytest.raises(fp.CheckpointError, match=r"a\.ckpt could not be written"):
        writer.wait()
    writer.wait()


@pytest.mark.filterwarnings("error")
def test_whatever_goes_wrong_in_the_background_is_not_lost(tmp_path):
    def breaks() -> None:
        raise ValueError("a logger's own mistake")

    writer = CheckpointWriter()
    writer.save({"state_dict": {}}, tmp_path / "a.ckpt", {}, breaks)
    with pytest.raises(Exception, match="a logger's own mistake"):
        writer.wait()


# Pointing, replacing, loading a model


def test_a_link_stands_for_a_checkpoint_and_is_replaced_atomically(tmp_path):
    first, second = write(tmp_path / "1.ckpt", x=1), write(tmp_path / "2.ckpt", x=2)
    for target in (first, second):
        checkpoint.point(tmp_path / checkpoint.LAST, target)
    assert checkpoint.load(tmp_path / checkpoint.LAST)["x"] == 2
    tmp_path.rename(tmp_path.with_name("moved"))
    assert checkpoint.load(tmp_path.with_name("moved") / checkpoint.LAST)["x"] == 2


def test_saving_under_the_same_name_replaces_it(tmp_path):
    write(tmp_path / "a.ckpt", x=1)
    write(tmp_path / "a.ckpt", x=2)
    assert checkpoint.load(tmp_path / "a.ckpt")["x"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_the_newest_is_the_one_that_was_written_last_whatever_its_name(tmp_path):
    for name in ("epoch=9", "epoch=10", "a"):
        write(tmp_path / f"{name}.ckpt")
    assert checkpoint.newest([tmp_path]).name == "a.ckpt"
    assert checkpoint.newest([]) is None


@pytest.fixture
def trained(make_trainer) -> Path:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(width=5), loader())
    return Path(trainer.checkpoint_callback.last_model_path)


def test_a_model_is_rebuilt_with_the_arguments_it_was_made_with(trained):
    model = Classifier.load_from_checkpoint(trained)
    assert model.hparams.width == 5
    weights = checkpoint.load(trained)["state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert Classifier.load_from_checkpoint(str(trained), lr=7.0).hparams.lr == 7.0


def test_arguments_that_no_checkpoint_can_hold_are_asked_for(make_trainer):
    class Wraps(Classifier):
        def __init__(self, net: torch.nn.Module, lr: float = 0.01) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["width", "classes"])
            self.net = net

    net = torch.nn.Linear(8, 3)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Wraps(net), loader())
    path = trainer.checkpoint_callback.last_model_path
    with pytest.raises(fp.CheckpointError, match=r"does not hold the argument net of Wraps: pass it.*net=…"):
        Wraps.load_from_checkpoint(path)
    assert torch.equal(Wraps.load_from_checkpoint(path, net=torch.nn.Linear(8, 3)).net.weight, net.weight)


def test_a_misspelt_argument_is_refused_rather_than_ignored(trained):
    with pytest.raises(fp.FootplateError, match='Did you mean "width"'):
        Classifier.load_from_checkpoint(trained, widht=9)


def test_a_lightning_file_can_be_read(tmp_path):
    model = Classifier(width=4)
    state = {
        "state_dict": model.state_dict(),
        "hyper_parameters": {"lr": 0.5, "width": 4},
        "pytorch-lightning_version": "2.6.6",
        "callbacks": OrderedDict(),
    }
    torch.save(state, tmp_path / "model.ckpt")
    back = Classifier.load_from_checkpoint(tmp_path / "model.ckpt")
    assert back.hparams.lr == 0.5
    assert torch.equal(back.net[0].weight, model.net[0].weight)


OTHER = {
    "layers of another size": lambda: Classifier(width=9),
    "another model": lambda: Other(),
}


class Other(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("name", OTHER)
def test_a_checkpoint_of_another_model_is_one_error_and_changes_nothing(name, trained, make_trainer):
    model = OTHER[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        fp.CheckpointError, match=rf"made by .*Classifier, is not a checkpoint of this {type(model).__name__}"
    ):
        make_trainer().fit(model, loader(), ckpt_path=trained)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_may_ask_for_less_strict_loading(trained):
    class Grown(Classifier):
        strict_loading = False

        def __init__(self, **kwargs) -> None:
            super().__init__(**kwargs)
            self.extra = torch.nn.Linear(1, 1)

    weights = checkpoint.load(trained)["state_dict"]
    assert torch.equal(Grown.load_from_checkpoint(trained, width=5).net[0].weight, weights["net.0.weight"])
    with pytest.raises(fp.CheckpointError, match=r"it lacks extra\.bias, extra\.weight"):
        Grown.load_from_checkpoint(trained, width=5, strict=True)


def test_views_of_one_memory_that_read_it_differently_come_back_as_they_were(tmp_path):
    z = torch.complex(torch.ones(2), torch.full((2,), 3.0))
    wide = z.to(torch.complex128)
    views = {
        "imaginary": z.imag,
        "negative": z.conj().imag,
        "as it is": z,
        "conjugated": z.conj(),
        "wide": wide,
        "wide, conjugated": wide.conj(),
        "wide, negative": torch._neg_view(wide),
    }
    loaded = roundtrip(tmp_path / "a.ckpt", views)
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in views.items()
    }
