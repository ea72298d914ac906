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
from footplate.core.errors import ConfigError
from footplate.distributed.fsdp import repeated_blocks
from footplate.distributed.meta_device import innermost_first, materialize, on_meta

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
