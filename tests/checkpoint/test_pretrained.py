"""`fp.load_pretrained`: weights in safetensors files become those of a module, or the error says what doesn't fit."""

from __future__ import annotations

import copy
import json
import pickle

import models  # noqa: F401  lets torchvision be imported, which transformers looks for
import pytest
import torch
from models import ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint import stored_tensor
from footplate.distributed import fsdp
from footplate.distributed.base import Strategy
from footplate.distributed.stored_weights import stored_of

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
}  # fmt: skip


def llama(tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def on_meta(build):
    with torch.device("meta"):
        return build()


def made(module):
    """The module, as the trainer makes it on one device."""
    Strategy().place(module, CPU)
    return module


def same(one, other):
    for name, tensor in [*one.state_dict().items(), *one.named_buffers()]:
        assert torch.equal(tensor, {**other.state_dict(), **dict(other.named_buffers())}[name]), name


@pytest.fixture
def saved(tmp_path):
    """A model of transformers, and its directory with an index of several files."""
    torch.manual_seed(1)
    model = llama()
    # No draw gives these numbers again.
    for parameter in model.parameters():
        parameter.data.add_(torch.rand_like(parameter))
    folder = tmp_path / "llama"
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return model, folder


def test_a_model_on_the_meta_device_gets_the_weights_and_computes_its_rotary_frequencies(saved):
    model, folder = saved
    loaded = on_meta(llama)
    fp.load_pretrained(loaded, folder)
    assert loaded.lm_head.weight.is_meta
    made(loaded)
    same(model, loaded)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.model.rotary_emb.inv_freq.abs().sum() > 0
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_model_with_memory_gets_the_weights_at_once(saved):
    model, folder = saved
    loaded = llama()
    fp.load_pretrained(loaded, folder)
    same(model, loaded)


def test_what_was_noted_goes_along_with_copies_of_a_module(saved):
    model, folder = saved
    loaded = on_meta(llama)
    fp.load_pretrained(loaded, folder)
    for twin in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        same(model, made(twin))


class Text(fp.Module):
    folder = None
    prefix = ""

    def configure_model(self):
        self.net = on_meta(llama)
        fp.load_pretrained(self.net, self.folder, self.prefix)

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(root, strategy, module=Text, steps=1, batch_size=4, **settings):
    trainer = fp.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, seed=1, logger=False,
        default_root_dir=root, strategy=strategy, max_steps=steps, **settings,
    )  # fmt: skip
    model = module()
    rows = [(7 * row + torch.arange(16)) % 64 for row in range(8)]
    trainer.fit(model, DataLoader(rows, batch_size))
    return trainer.parallel.whole(trainer.parallel.state_dict(model))


BLOCK = {"LlamaDecoderLayer"}
STRATEGIES = {
    "ddp": ("ddp", 2, 4),
    "fsdp": (fp.FSDPStrategy(BLOCK), 2, 4),
    "groups": (fp.FSDPStrategy(BLOCK, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), 4, 2),
    "cut": (fp.ModelParallelStrategy(2, 2, BLOCK), 4, 4),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_begins_with_the_weights(tmp_path, monkeypatch, saved, name):
    model, folder = saved
    monkeypatch.setattr(Text, "folder", folder)
    strategy, processes, batch_size = STRATEGIES[name]
    reads: list[int] = []
    monkeypatch.setattr(stored_tensor, "_read_all", counted(stored_tensor._read_all, reads))

    if name in ("fsdp", "groups"):
        # No rank has memory for a whole layer.
        monkeypatch.setattr(fsdp, "_whole_on_meta", without_parameters)

    def run():
        # Without a step that changes weights.
        monkeypatch.setattr(Text, "configure_optimizers", lambda self: torch.optim.SGD(self.parameters(), lr=0.0))
        return fit(tmp_path / "run", strategy, batch_size=batch_size), sum(reads)

    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    of_ranks = ranks.run(run, processes)
    for weights, _ in of_ranks:
        for key, value in model.state_dict().items():
            assert torch.equal(weights[f"net.{key}"], value), key
    if name == "fsdp":
        assert sum(read for _, read in of_ranks) == nbytes


def without_parameters(piece):
    assert not [name for name, layer in piece if list(layer.parameters(False))]
    return lambda: None


def counted(read_all, reads):
    def read(file, elements, shown):
        reads.append(elements.nbytes)
        return read_all(file, elements, shown)

    return read


def test_shards_of_a_checkpoint_are_read_by_another_number_of_ranks(tmp_path, monkeypatch, saved):
    _, folder = saved
    monkeypatch.setattr(Text, "folder", folder)
    trained = ranks.run(lambda: fit(tmp_path / "one", STRATEGIES["fsdp"][0], steps=2), 2)[0]
    path = checkpoint.newest([tmp_path / "one" / "checkpoints"])
    monkeypatch.setattr(Text, "folder", path)
    monkeypatch.setattr(Text, "prefix", "net.")
    monkeypatch.setattr(Text, "configure_optimizers", lambda self: torch.optim.SGD(self.parameters(), lr=0.0))
    alone, loaded = fit(tmp_path / "alone", "auto"), Text.load_from_checkpoint(path).state_dict()
    for weights in (*ranks.run(lambda: fit(tmp_path / "two", "fsdp", batch_size=2), 3), alone, loaded):
        assert all(torch.equal(value, trained[name]) for name, value in weights.items())


def test_layers_that_the_user_has_sharded_get_their_shards_at_once(saved):
    model, folder = saved

    def run():
        torch.distributed.init_process_group("gloo")
        loaded = llama()
        fully_shard(loaded)
        fp.load_pretrained(loaded, folder)
        return {name: value.full_tensor() for name, value in loaded.state_dict().items()}

    for weights in ranks.run(run, 2):
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_layers_that_the_user_shards_after_the_call_get_their_shards_too(tmp_path, monkeypatch, saved):
    model, folder = saved

    class Sharded(Text):
        def configure_model(self):
            self.net = on_meta(llama)
            fp.load_pretrained(self.net, folder)
            fully_shard(self.net)
            self.net.to_empty(device="cpu")
            with torch.no_grad():
                self.net._init_weights(self.net.model.rotary_emb)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    for weights in ranks.run(lambda: fit(tmp_path / "run", "fsdp", Sharded), 2):
        assert all(torch.equal(value, weights[f"net.{name}"]) for name, value in model.state_dict().items())


def test_machines_with_different_files_refuse_to_train(tmp_path, monkeypatch, saved):
    _, folder = saved
    other = tmp_path / "other"
    llama().save_pretrained(other)

    class Differs(Text):
        def configure_model(self):
            self.folder = folder if self.trainer.global_rank == 0 else other
            super().configure_model()

    def run():
        with pytest.raises(fp.ConfigError, match="the files of load_pretrained"):
            fit(tmp_path / "run", "fsdp", Differs)

    ranks.run(run, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)


@pytest.fixture
def file(tmp_path):
    """The weights of a `Net`, and their file."""
    torch.manual_seed(2)
    weights = {name: torch.rand_like(value.float()).to(value.dtype) for name, value in Net().state_dict().items()}
    path = tmp_path / "net.safetensors"
    save_file(weights, path)
    return weights, path


def test_buffers_are_read_and_types_converted(tmp_path, file):
    weights, path = file
    save_file({name: value.bfloat16() if value.dim() else value for name, value in weights.items()}, path)
    net = on_meta(Net)
    fp.load_pretrained(net, path)
    made(net)
    for name, value in net.state_dict().items():
        assert value.dtype == weights[name].dtype
        assert torch.equal(value, weights[name].bfloat16().to(value.dtype) if value.dim() else weights[name])


def changed(path, **tensors):
    weights = {**load_file(path), **tensors}
    save_file({name: value for name, value in weights.items() if value is not None}, path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.running_var": None}, r"it lacks norm\.running_var"),
        ({"extra": torch.ones(1)}, r"it has unknown extra"),
        ({"first.weight": torch.ones(3, 5)}, r"shapes differ: first\.weight \(3, 5\), and \(3, 4\) in the module"),
        ({"first.bias": torch.ones(3).int()}, r"types differ: first\.bias torch\.int32, and torch\.float32 in the"),
        (
            {"first.bias": torch.ones(3).to(torch.float8_e4m3fn)},
            r"types differ: first\.bias torch\.float8_e4m3fn, and torch\.float32",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(file, change, message):
    path = changed(file[1], **change)
    net = Net()
    before = copy.deepcopy(net)
    with pytest.raises(fp.CheckpointError, match=message):
        fp.load_pretrained(net, path)
    same(before, net)
    assert not any(stored_of(layer) for layer in net.modules())


def test_names_with_another_beginning_are_read_with_a_prefix(file):
    weights, path = file
    net = Net()
    save_file({"lm_head": torch.ones(2), **{f"model.{name}": value for name, value in weights.items()}}, path)
    with pytest.raises(fp.CheckpointError, match=r'with prefix="model\." the names fit'):
        fp.load_pretrained(net, path)
    fp.load_pretrained(net, path, prefix="model.")
    assert torch.equal(net.first.weight, weights["first.weight"])


def test_a_layer_whose_names_fit_is_named(file):
    with pytest.raises(fp.CheckpointError, match="the names fit its layer net: pass that"):
        fp.load_pretrained(nn.ModuleDict({"net": Net()}), file[1])


def test_one_tensor_with_two_names_must_have_the_same_numbers_under_both(tmp_path):
    untied = llama(tied=False)
    untied.save_pretrained(tmp_path)
    with pytest.raises(
        fp.CheckpointError, match=r"lm_head\.weight hold different numbers, .*tie_word_embeddings=False"
    ):
        fp.load_pretrained(llama(), tmp_path)
    fp.load_pretrained(llama(tied=False), tmp_path)
    untied.lm_head.weight = untied.model.embed_tokens.weight
    save_file({name: value.clone() for name, value in untied.state_dict().items()}, tmp_path / "model.safetensors")
    fp.load_pretrained(llama(), tmp_path)


def test_a_model_that_shares_nothing_needs_both_names(saved):
    with pytest.raises(fp.CheckpointError, match=r"it lacks lm_head\.weight"):
        fp.load_pretrained(llama(tied=False), saved[1])


def test_frequencies_in_old_files_are_computed_instead(tmp_path, saved):
    model, _ = saved
    old = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file({**old, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    loaded = on_meta(llama)
    fp.load_pretrained(loaded, tmp_path)
    same(model, made(loaded))


class Masked(nn.Module):
    """Its buffer is computed in __init__, and no method computes it again."""

    def __init__(self, fills=False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.fills = fills
        self.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        if self.fills:
            torch.ones(3, 3, out=self.get_buffer("mask").float()).tril()
            self.get_buffer("mask").copy_(torch.ones(3, 3).tril())


def test_a_buffer_that_neither_a_file_nor_a_layer_fills_is_refused(tmp_path):
    save_file({"weight": torch.full((3, 3), 2.0)}, tmp_path / "f.safetensors")
    masked = on_meta(Masked)
    fp.load_pretrained(masked, tmp_path / "f.safetensors")
    with pytest.raises(
        fp.ConfigError, match=r"mask is on the meta device, and Masked\.reset_parameters\(\) doesn't give"
    ):
        made(masked)

    masked = on_meta(lambda: Masked(fills=True))
    fp.load_pretrained(masked, tmp_path / "f.safetensors")
    made(masked)
    assert torch.equal(masked.mask, torch.ones(3, 3).tril().bool())
    assert torch.equal(masked.weight, torch.full((3, 3), 2.0))


def test_the_last_call_counts(tmp_path, file):
    weights, path = file
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "later.safetensors")
    net = on_meta(Net)
    fp.load_pretrained(net.first, path, prefix="first.")
    fp.load_pretrained(net, tmp_path / "later.safetensors")
    assert torch.equal(made(net).first.weight, weights["first.weight"] + 1)


def test_directories_without_weights_are_refused(tmp_path, saved):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(fp.CheckpointError, match=r"holds neither model\.safetensors nor .* save_pretrained\(\)"):
        fp.load_pretrained(Net(), tmp_path)
    with pytest.raises(fp.CheckpointError, match="There is nothing at"):
        fp.load_pretrained(Net(), tmp_path / "none")
    _, folder = saved
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()
    with pytest.raises(fp.CheckpointError, match=r"model-00001-of-\d+\.safetensors isn't there"):
        fp.load_pretrained(llama(), folder)


def test_an_index_that_lies_is_refused(saved):
    _, folder = saved
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first, last = sorted(set(listed["weight_map"].values()))[0 :: len(set(listed["weight_map"].values())) - 1]
    name = next(name for name, file in listed["weight_map"].items() if file == first)
    listed["weight_map"][name] = last
    index.write_text(json.dumps(listed))
    with pytest.raises(fp.CheckpointError, match=f"lists {name} in {last}, which doesn't hold it"):
        fp.load_pretrained(llama(), folder)
    index.write_text("{}")
    with pytest.raises(fp.CheckpointError, match="it has no weight_map"):
        fp.load_pretrained(llama(), folder)
