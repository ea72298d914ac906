"""Checkpoints of a sharded model: each rank writes its part, any number of ranks reads them; all parts exist or none."""

from __future__ import annotations

import os
import resource
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import template
import torch
from models import ranks
from models.small import dataset
from object_storage import make_bucket, s3_settings, serve_s3
from ports import free_port
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint import by_parts, conversion, inspection, stored_tensor

from .test_fsdp import Deep, close, train

CHECKPOINTS = "checkpoints"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run two ranks with checkpoints after two and after four epochs; return the final states of the ranks."""
    root = tmp_path_factory.mktemp("whole")
    ended = ranks.run(lambda: train(root, 8, 4, callbacks=fp.ModelCheckpoint(every_n_epochs=2, save_top_k=-1)), 2)
    return root, ended


def saved(root):
    """The checkpoints of a run, the oldest first."""
    paths = checkpoint.find(root / CHECKPOINTS)
    return sorted(paths, key=lambda path: checkpoint.read_meta(path)["created"])


def begin_from(path, root):
    """Make a directory look like that of a run that has saved this checkpoint."""
    target = root / CHECKPOINTS / path.name
    target.mkdir(parents=True)
    for file in path.iterdir():
        os.link(file, target / file.name)


def test_each_rank_writes_what_it_has(whole):
    root, _ = whole
    path = saved(root)[-1]
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert set(sizes) == {"state.safetensors", "shard-00000.safetensors", "shard-00001.safetensors", "meta.json"}
    parts = [checkpoint.load(path)["state_dict"][name].nbytes for name in ("first.weight", "last.weight")]
    assert min(sizes["shard-00000.safetensors"], sizes["shard-00001.safetensors"]) > sum(parts) / 2


def test_what_was_written_in_parts_is_read_whole(whole):
    root, ended = whole
    state = checkpoint.load(saved(root)[-1])
    for name, value in ended[0]["weights"].items():
        assert torch.equal(state["state_dict"][name], value), name
    parameters = list(Deep().parameters())
    for place, values in state["optimizer_states"][0]["state"].items():
        assert values["exp_avg"].shape == parameters[place].shape
    Deep.load_from_checkpoint(saved(root)[-1])


def test_torch_reads_the_shards_too(whole):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    root, ended = whole
    wanted = {f"state_dict.{name}": torch.zeros_like(value) for name, value in ended[0]["weights"].items()}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(saved(root)[-1])), no_dist=True)
    for name, value in ended[0]["weights"].items():
        assert torch.equal(wanted[f"state_dict.{name}"], value), name


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_ranks_goes_on_from_it(count, whole, tmp_path):
    root, ended = whole
    begin_from(saved(root)[0], tmp_path)
    rows = {1: 16, 2: 8, 3: 8}[count]
    if count == 1:
        rest = [train(tmp_path, rows, 4, "auto", "last")]
    else:
        rest = ranks.run(lambda: train(tmp_path, rows, 4, "fsdp", "last"), count)
    if count == 2:
        for name, value in ended[0]["weights"].items():
            assert torch.equal(value, rest[0]["weights"][name]), name
    elif count == 1:
        close(ended[0]["weights"], rest[0]["weights"])
    else:  # other global batches from here on
        assert rest[0]["val_loss"] == rest[2]["val_loss"]
        assert abs(rest[0]["val_loss"] - ended[0]["val_loss"]) < 0.2


def test_ranks_with_whole_models_go_on_from_it_and_the_other_way(whole, tmp_path):
    root, ended = whole
    begin_from(saved(root)[0], tmp_path / "ddp")
    rest = ranks.run(lambda: train(tmp_path / "ddp", 8, 4, "ddp_find_unused_parameters_true", "last"), 2)
    close(ended[0]["weights"], rest[0]["weights"])

    train(tmp_path / "plain", 16, 2, "auto")
    rest = ranks.run(lambda: train(tmp_path / "plain", 8, 4, "fsdp", "last"), 2)
    close(ended[0]["weights"], rest[0]["weights"])


def test_a_sharded_checkpoint_is_evaluated_by_one_process(whole, tmp_path):
    root, ended = whole
    trainer = fp.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        default_root_dir=tmp_path,
    )  # fmt: skip
    results = trainer.test(WithTest(), DataLoader(dataset(33), 8), ckpt_path=saved(root)[-1], verbose=False)
    assert abs(results[0]["val_loss"] - ended[0]["val_loss"]) < 1e-5


class WithTest(Deep):
    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)


def test_inspection_counts_what_lies_in_shards(whole):
    root, _ = whole
    path = saved(root)[-1]
    (inspected,) = inspection.inspect(path, verify=True)
    assert not inspected.fault
    weights = [value for value in Deep().state_dict().values() if value.is_floating_point()]
    assert inspected.weights["float32"] == sum(value.numel() for value in weights)
    assert inspected.nbytes == sum(file.stat().st_size for file in path.iterdir())


def test_conversion_makes_whole_weights_of_it(whole, tmp_path):
    root, ended = whole
    conversion.convert(saved(root)[-1], tmp_path / "weights.safetensors")
    tensors = load_file(tmp_path / "weights.safetensors")
    for name, value in ended[0]["weights"].items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "shard-00001.safetensors"])
@pytest.mark.parametrize("harm", ["removed", "cut short", "one bit flipped", "another's"])
def test_without_every_shard_as_it_was_written_there_is_no_checkpoint(name, harm, whole, tmp_path):
    root, _ = whole
    begin_from(saved(root)[0], tmp_path)
    (path,) = saved(tmp_path)
    file = path / name
    content = bytearray(file.read_bytes())
    file.unlink()
    if harm == "cut short":
        file.write_bytes(content[:-1])
    elif harm == "one bit flipped":
        content[-5] ^= 1
        file.write_bytes(content)
    elif harm == "another's":
        other = path / ("shard-00001.safetensors" if name.endswith("0.safetensors") else "shard-00000.safetensors")
        file.write_bytes(other.read_bytes())
    if harm in ("removed", "cut short"):  # known without reading it
        assert not checkpoint.is_complete(path)
    with pytest.raises(fp.CheckpointError, match=f"damaged.*{name}|{name}.*damaged"):
        checkpoint.load(path)
    (inspected,) = inspection.inspect(path, verify=True)
    assert name in inspected.fault


class Large(fp.Module):
    """A module with so many weights that a save takes a while."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(8, 400_000, bias=False)

    def training_step(self, batch, batch_idx):
        return self.wide(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Kill(fp.Callback):
    """Kills a rank a given time after its first save has begun."""

    order = 3

    def __init__(self, who, after_s):
        self.who, self.after_s = who, after_s

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.progress.batches == 2 and trainer.global_rank == self.who:
            time.sleep(self.after_s)
            os.kill(os.getpid(), signal.SIGKILL)


def train_large(root, *callbacks, steps=4):
    trainer = fp.Trainer(
        accelerator="cpu", strategy="fsdp", logger=False, enable_progress_bar=False, enable_model_summary=False,
        max_steps=steps, default_root_dir=root, seed=1,
        callbacks=[fp.ModelCheckpoint(every_n_train_steps=1, save_top_k=1), *callbacks],
    )  # fmt: skip
    trainer.fit(Large(), DataLoader(dataset(64), 8), ckpt_path="last")


@pytest.mark.slow
@pytest.mark.parametrize(("who", "delays"), [(0, (0.0, 0.03)), (1, (0.01,))])
def test_killed_while_the_ranks_write_what_is_left_is_whole(who, delays, tmp_path):
    for attempt, after_s in enumerate(delays):
        root = tmp_path / str(attempt)
        with ranks.start(lambda root=root, after_s=after_s: train_large(root, Kill(who, after_s)), 2) as cut:
            began = time.monotonic()
            codes = cut.exit_codes()
            assert codes[who] == -signal.SIGKILL
            assert codes[1 - who] == 1
            assert time.monotonic() - began < 100
        left = [path for path in (root / CHECKPOINTS).glob("*.ckpt") if not path.is_symlink()]
        assert left, "the first save was complete before the second began"
        for path in left:
            state = checkpoint.load(path)
            assert state["global_step"] == checkpoint.read_meta(path)["global_step"]
        ranks.run(lambda root=root: train_large(root), 2)
        litter = [path.name for path in (root / CHECKPOINTS).iterdir() if not path.name.endswith(".ckpt")]
        assert not litter
        assert saved(root)[-1].name.endswith("step=4.ckpt")


def fill_disk_of(rank):
    """Limit every new file of this rank to a megabyte."""
    if int(os.environ["RANK"]) == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_cant_be_written_ends_all_ranks_and_leaves_no_checkpoint(rank, tmp_path):
    def run():
        fill_disk_of(rank)
        with pytest.raises(fp.CheckpointError, match="could not be written: File too large"):
            train_large(tmp_path)
        return "said"

    assert ranks.run(run, 2) == ["said", "said"]
    assert not list((tmp_path / CHECKPOINTS).iterdir())


class KillOnce(fp.Callback):
    """Kills rank 1 at the fifth batch of the first attempt."""

    def __init__(self, root):
        self.killed = root / "killed"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.progress.batches == 5 and trainer.global_rank == 1 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_ranks_that_are_started_again_go_on_from_their_shards(tmp_path):
    ended = []
    for name, callbacks in (("whole", []), ("cut", [KillOnce(tmp_path)])):
        torch.manual_seed(0)
        model = Deep()
        trainer = fp.Trainer(
            accelerator="cpu", devices=2, strategy="fsdp", logger=False, enable_progress_bar=False, max_epochs=2,
            enable_model_summary=False, default_root_dir=tmp_path / name, seed=1,
            callbacks=[fp.ModelCheckpoint(every_n_train_steps=2), *callbacks],
        )  # fmt: skip
        trainer.fit(model, DataLoader(dataset(50), 8, shuffle=True))
        ended.append(model.state_dict())
    assert (tmp_path / "killed").exists()
    for name, value in ended[0].items():
        assert torch.equal(value, ended[1][name]), name


def test_weights_alone_are_saved_in_parts_too(tmp_path):
    def save():
        torch.manual_seed(0)
        trainer = fp.Trainer(
            accelerator="cpu", strategy="fsdp", logger=False, enable_progress_bar=False, max_steps=2, seed=1,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        model = Deep()
        trainer.fit(model, DataLoader(dataset(50), 8))
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        return trainer.parallel.whole(trainer.parallel.state_dict(model))

    weights, _ = ranks.run(save, 2)
    assert (tmp_path / "weights.ckpt" / "shard-00001.safetensors").exists()
    loaded = Deep.load_from_checkpoint(tmp_path / "weights.ckpt").state_dict()
    for name, value in weights.items():
        assert torch.equal(value, loaded[name]), name


TRAINS_IN_A_BUCKET = """
    import sys, torch, footplate as fp
    from distributed.test_fsdp import Deep, dataset
    from torch.utils.data import DataLoader

    trainer = fp.Trainer(
        accelerator="cpu", devices=2, strategy="fsdp", logger=False, enable_progress_bar=False, max_steps=int(sys.argv[2]),
        enable_model_summary=False, default_root_dir=sys.argv[1], seed=1,
        callbacks=fp.ModelCheckpoint("s3://lake/run", filename="{step}"),
    )
    model = Deep()
    trainer.fit(model, DataLoader(dataset(50), 8), ckpt_path="last")
    torch.save(model.state_dict(), sys.argv[3])
"""


@pytest.mark.engine
def test_into_an_object_store_the_model_is_written_whole(tmp_path, monkeypatch):
    port = free_port()
    for name, value in s3_settings(port).items():
        monkeypatch.setenv(name, value)
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{tests.parent}")
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINS_IN_A_BUCKET))
    with serve_s3(port):
        make_bucket(port)
        for steps in ("3", "5"):
            weights = tmp_path / "weights.pt"
            arguments = [script, tmp_path / "run", steps, weights]
            with template.Popen([sys.executable, *arguments]) as program:
                assert program.wait(120) == 0
            state = checkpoint.load(f"s3://lake/run/step={steps}.ckpt")
            for name, value in torch.load(weights, weights_only=True).items():
                assert torch.equal(state["state_dict"][name], value), name
        assert [path.name for path in checkpoint.find("s3://lake/run")] == ["step=5.ckpt"]


@pytest.mark.parametrize("by", ["shards", "one process"])
def test_a_rank_that_goes_on_reads_its_parts_only(by, whole, tmp_path, monkeypatch):
    # Tensors of any size are read by parts.
    monkeypatch.setattr(by_parts, "_LARGE_NBYTES", 0)
    root, _ = whole
    if by == "one process":
        root = tmp_path / "one"
        train(root, 16, 2)
    path = saved(root)[0]
    begin_from(path, tmp_path / "run")
    read: list[int] = []
    read_all = stored_tensor._read_all

    def counted(file, elements, shown):
        read.append(elements.nbytes)
        return read_all(file, elements, shown)

    monkeypatch.setattr(stored_tensor, "_read_all", counted)
    run = tmp_path / "run" / CHECKPOINTS / path.name
    of_ranks = ranks.run(lambda: (train(tmp_path / "run", 4, 2, ckpt_path=run), sum(read)), 4)
    state = checkpoint.load(path)
    tensors = [*state["state_dict"].values()]
    tensors += [value for each in state["optimizer_states"][0]["state"].values() for value in each.values()]
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.dim())
    # A scalar, such as the number of steps, is read by every rank.
    assert nbytes <= sum(count for _, count in of_ranks) <= nbytes + 4 * 4 * len(tensors)


def test_the_ranks_share_out_the_files_whose_checksums_they_compare(whole, tmp_path):
    path = saved(whole[0])[0]
    begin_from(path, tmp_path)
    damaged = tmp_path / CHECKPOINTS / path.name
    shard = damaged / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    by_parts.load_by_parts(damaged, rank=0, ranks=2)
    with pytest.raises(fp.CheckpointError, match=r"the checksum of shard-00001\.safetensors differs"):
        by_parts.load_by_parts(damaged, rank=1, ranks=2)
