"""`footplate.distributed.meta_device`: layers that were built without memory are made on the device, with numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import ranks
from models.small import dataset
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.core.errors import ConfigError
from footplate.distributed.fsdp import repeated_blocks
from footplate.distributed.meta_device import initializers_of, innermost_first, materialize, on_meta, pieces_of

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """Its parts have half of their usual numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        self.linear.weight.mul_(0.5)

    def forward(self, x):
        return x + self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class Training(fp.Module):
    net: nn.Module

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class OnMeta(Training):
    def configure_model(self):
        with torch.device("meta"):
            self.net = Net()


def fit(root, model, strategy="auto", **settings):
    torch.manual_seed(0)
    trainer = fp.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, seed=1, logger=False,
        default_root_dir=root, strategy=strategy, max_epochs=2, **settings,
    )  # fmt: skip
    world = trainer.world.size
    trainer.fit(model, DataLoader(dataset(48), 16 // world))
    state = trainer.parallel.state_dict(model)
    sharded = sorted(name for name, value in state.items() if isinstance(value, DTensor))
    return trainer.parallel.whole(state), sharded


def made(build):
    with torch.device("meta"):
        module = build()
    assert on_meta(module)
    torch.manual_seed(0)
    materialize(innermost_first(module), CPU)
    assert not on_meta(module)
    return module


def same(one, other):
    for (name, value), (_, expected) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(value, expected), name


def nested():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.LSTM(4, 4))


@pytest.mark.parametrize("build", [Net, nested])
def test_layers_draw_the_numbers_that_they_draw_when_they_are_built(build):
    module = made(build)
    torch.manual_seed(0)
    same(module, build())


def test_a_layer_with_a_method_of_the_other_name_draws_its_numbers():
    attention = made(lambda: nn.MultiheadAttention(8, 2))
    assert attention.in_proj_weight.std() > 0
    assert not attention.in_proj_bias.any()
    assert not attention.out_proj.bias.any()


def test_a_shared_parameter_stays_shared_and_keeps_its_attributes():
    def build():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        first.bias.requires_grad_(False)
        first.weight.decays = False  # pyright: ignore[reportAttributeAccessIssue]
        return nn.Sequential(first, second)

    first, second = made(build)
    assert first.weight is second.weight
    assert vars(first.weight) == {"decays": False}
    assert not first.bias.requires_grad
    assert isinstance(first.weight, nn.Parameter)


def test_real_layers_keep_their_numbers():
    real = nn.Linear(4, 4)
    before = real.weight.clone()
    with torch.device("meta"):
        meta = nn.Linear(4, 4)
    materialize(innermost_first(nn.Sequential(real, meta)), CPU)
    assert torch.equal(real.weight, before)


def pieces(model):
    return [[name for name, _ in piece] for piece in pieces_of(innermost_first(model), initializers_of(model))]


def test_layers_are_filled_one_by_one_but_for_those_that_another_layer_fills():
    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2), Scaled(), nn.Linear(2, 2))
    assert [piece for piece in pieces(model) if piece[0] not in ("", "0") and "dropout" not in piece[0]] == [
        ["0.self_attn.out_proj", "0.self_attn"], ["0.linear1"], ["0.linear2"], ["0.norm1"], ["0.norm2"],
        ["1.linear", "1"], ["2"],
    ]  # fmt: skip


def test_layers_that_share_a_parameter_or_are_filled_by_the_model_are_one_piece():
    with torch.device("meta"):
        shared = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        shared[2].weight = shared[0].weight
        filled = Gpt()
    assert pieces(shared) == [["0", "1", "2", ""]]
    assert pieces(filled) == [["linear", "norm", "gain", ""]]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_layer_that_cannot_give_its_numbers_is_named():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.raises(ConfigError, match=r"1\.scale is on the meta device, and Bare has no reset_parameters\(\)"):
        materialize(innermost_first(module), CPU)


def test_numbers_that_a_layer_has_already_are_not_overwritten():
    with torch.device("meta"):
        layer = Scaled()
    layer.before = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"linear\.weight is on the meta device and before\.weight is not"):
        materialize(innermost_first(layer), CPU)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_model_on_the_meta_device_is_trained(tmp_path, strategy):
    weights, _ = fit(tmp_path, OnMeta(), strategy)
    assert all(value.isfinite().all() for value in weights.values())


def test_load_from_checkpoint_makes_the_layers_of_configure_model(tmp_path):
    weights, _ = fit(tmp_path, OnMeta())
    loaded = OnMeta.load_from_checkpoint(checkpoint.newest([tmp_path / "checkpoints"]))
    assert not on_meta(loaded)
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())


@pytest.mark.slow
def test_a_model_on_the_meta_device_gets_the_weights_that_other_processes_have_trained(make_trainer):
    model, made = OnMeta(), make_trainer(devices=2, strategy="fsdp", max_epochs=1)
    made.fit(model, DataLoader(dataset(48), 8))
    assert not on_meta(model)
    saved = checkpoint.load(checkpoint.newest([made.checkpoint_dir]))["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_sharded_model_is_made_unit_by_unit_and_learns_what_a_whole_one_learns(tmp_path, monkeypatch):
    # Each layer has a seed of its own, since the order in which layers are made differs.
    def seeded(self):
        torch.manual_seed(sum(self.weight.shape))
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)

    monkeypatch.setattr(nn.Linear, "reset_parameters", seeded)
    alone, _ = fit(tmp_path / "alone", OnMeta())
    (first, names), (second, _) = ranks.run(lambda: fit(tmp_path / "two", OnMeta(), "fsdp"), 2)
    assert {"net.blocks.0.linear.weight", "net.first.weight", "net.last.bias"} <= set(names)
    for name, value in alone.items():
        torch.testing.assert_close(value, first[name], rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(first[name], second[name]), name


def test_layers_that_the_user_has_sharded_stay_as_they_are(tmp_path):
    class Own(Training):
        def configure_model(self):
            torch.manual_seed(3)
            self.net = Net()
            for block in self.net.blocks[:2]:
                fully_shard(block)
            assert [*repeated_blocks(self)] == []

    class Whole(Own):
        def configure_model(self):
            super().configure_model()
            fully_shard(self)

    class Plain(Training):
        def configure_model(self):
            torch.manual_seed(3)
            self.net = Net()

    alone, _ = fit(tmp_path / "alone", Plain())
    for kind in (Own, Whole):
        (first, names), _ = ranks.run(lambda kind=kind: fit(tmp_path / kind.__name__, kind(), "fsdp"), 2)
        assert {"net.blocks.0.linear.weight", "net.blocks.2.linear.weight", "net.first.weight"} <= set(names)
        for name, value in alone.items():
            torch.testing.assert_close(value, first[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_layer_that_was_sharded_on_the_meta_device_and_left_there_is_named(tmp_path):
    class Left(OnMeta):
        def configure_model(self):
            super().configure_model()
            fully_shard(self.net)

    def refused():
        with pytest.raises(ConfigError, match=r"net\.first\.weight is on the meta device, in a layer that was sharded"):
            fit(tmp_path, Left(), "fsdp")

    ranks.run(refused, 2)


class Gain(nn.Module):
    """Has no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(4))


class Gpt(nn.Module):
    """Fills its layers itself, as nanoGPT and transformers' models do."""

    def __init__(self, fills_gain: bool = True) -> None:
        super().__init__()
        self.linear, self.norm, self.gain = nn.Linear(4, 4), nn.LayerNorm(4), Gain()
        self.fills_gain = fills_gain
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)
        elif isinstance(module, Gain) and self.fills_gain:
            nn.init.constant_(module.gain, 2.0)


def on_meta_device(make):
    with torch.device("meta"):
        return make()


def test_a_model_fills_its_layers_by_init_weights():
    model = nn.Sequential(on_meta_device(Gpt), on_meta_device(Gpt))
    materialize(innermost_first(model), CPU, initializers_of(model))
    for part in model:
        assert torch.equal(part.linear.weight, torch.full((4, 4), 3.0))
        assert torch.equal(part.norm.weight, torch.ones(4))
        assert torch.equal(part.gain.gain, torch.full((4,), 2.0))
        assert bool(part.linear.bias.abs().max() <= 0.5)  # of reset_parameters


class Filling(nn.Module):
    """Fills the parts of a layer when it is called for the layer, as GPT-2 and T5 of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4))

    def _init_weights(self, module):
        if isinstance(module, nn.Sequential):
            nn.init.constant_(module[0].weight, 5.0)


def test_init_weights_may_fill_the_parts_of_a_layer():
    model = on_meta_device(Filling)
    materialize(innermost_first(model), CPU, initializers_of(model))
    assert torch.equal(model.block[0].weight, torch.full((4, 4), 5.0))


def test_init_weights_changes_no_numbers_that_a_layer_has_already():
    model = Filling()
    before = model.block[0].weight.clone()
    materialize(innermost_first(model), CPU, initializers_of(model))
    model.block.append(on_meta_device(lambda: nn.Linear(4, 4)))
    materialize(innermost_first(model), CPU, initializers_of(model))
    assert torch.equal(model.block[0].weight, before)
    assert not on_meta(model)


def test_a_layer_that_init_weights_leaves_out_is_refused():
    model = on_meta_device(lambda: Gpt(fills_gain=False))
    message = r"gain\.gain is on the meta device, and Gpt\._init_weights\(\) doesn't give it.* a Gain"
    with pytest.raises(ConfigError, match=message):
        materialize(innermost_first(model), CPU, initializers_of(model))


def test_an_init_weights_that_takes_no_layer_is_not_called():
    class Own(nn.Module):
        def _init_weights(self, std=0.02):
            raise AssertionError

    class Other(nn.Module):
        def _init_weights(self):
            raise AssertionError

    assert initializers_of(nn.Sequential(Own(), Other())) == {}


def test_the_nearest_init_weights_counts():
    inner, outer = Gpt(), Gpt()
    outer.inner = inner
    initializers = initializers_of(outer)
    assert initializers[id(inner.linear)].__self__ is inner
    assert initializers[id(outer.linear)].__self__ is outer
