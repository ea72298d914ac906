"""`FSDPStrategy`: which layers are units, when their weights are gathered and in which type, what is computed again."""

from __future__ import annotations

import copy
import os
import pickle
from collections import Counter
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from models import ranks
from models.small import dataset
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.distributed import fsdp_internals
from footplate.distributed.activation_checkpointing import checkpoint_activations
from footplate.distributed.fsdp_options import layers_of


class Block(nn.Module):
    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        Block.calls["forward"] += 1
        Block.calls[str(self.up.weight.dtype)] += 1
        return x + self.down(self.dropout(F.gelu(self.up(x))))


class Net(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.one, self.two = Block(), Block()  # not in a list: found by their type only

    def forward(self, x):
        return self.last(self.two(self.one(self.first(x))))

    def training_step(self, batch, batch_idx):
        assert batch[0].dtype == torch.float32
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(root, strategy, batch_size=16, epochs=2, dropout=0.0, ckpt_path=None, **settings):
    torch.manual_seed(0)
    trainer = fp.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, seed=1, logger=False,
        default_root_dir=root, strategy=strategy, max_epochs=epochs, **settings,
    )  # fmt: skip
    model = Net()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = dropout
    Block.calls.clear()
    trainer.fit(model, DataLoader(dataset(64), batch_size), ckpt_path=ckpt_path)
    state = trainer.parallel.state_dict(model)
    return {
        "weights": trainer.parallel.whole(state),
        "dtypes": {str(value.dtype) for value in state.values()},
        "placements": {value.placements for value in state.values() if isinstance(value, DTensor)},
        "units": [name for name, layer in model.named_modules() if isinstance(layer, FSDPModule)],
        "calls": dict(Block.calls),
        "steps": trainer.global_step,
    }


def close(one, other, rtol=1e-4, atol=1e-6):
    for name, value in one["weights"].items():
        torch.testing.assert_close(value, other["weights"][name], rtol=rtol, atol=atol, msg=name)


def same(one, other):
    return all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


def test_layers_of_the_given_types_are_units(tmp_path):
    alone = train(tmp_path / "alone", "auto")
    policies = {"type": {Block}, "name": ["Block"], "default": None}

    def train_each():
        return {
            name: train(tmp_path / name, fp.FSDPStrategy(auto_wrap_policy=policy), 8)
            for name, policy in policies.items()
        }

    of_policy = ranks.run(train_each, 2)[0]
    for name in ("type", "name"):
        assert of_policy[name]["units"] == ["", "one", "two"]
        close(alone, of_policy[name])
    assert of_policy["default"]["units"] == [""]


@pytest.mark.parametrize("sharding", ["SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_each_way_of_sharding_learns_what_one_process_learns(tmp_path, sharding):
    strategy = fp.FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy=sharding)
    alone = train(tmp_path / "alone", "auto", gradient_clip_val=0.1)
    first, second = ranks.run(lambda: train(tmp_path / "two", strategy, 8, gradient_clip_val=0.1), 2)
    close(alone, first)
    assert same(first, second)


@pytest.mark.parametrize(("sharding", "gathers"), [("FULL_SHARD", 5), ("SHARD_GRAD_OP", 3)])
def test_a_step_gathers_the_root_once_and_a_block_twice_or_once(tmp_path, monkeypatch, sharding, gathers):
    calls: list[object] = []
    gather = fsdp_internals._AllGather.__call__

    def counted(self, *args, **kwargs):
        calls.append(self)
        return gather(self, *args, **kwargs)

    monkeypatch.setattr(fsdp_internals._AllGather, "__call__", counted)
    strategy = fp.FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy=sharding)
    steps_of_ranks = ranks.run(lambda: (train(tmp_path, strategy, 8)["steps"], len(calls)), 2)
    assert steps_of_ranks == [(8, 8 * gathers)] * 2


class StepsWithoutForward(Net):
    """Its steps call layers, not the module itself."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.last(self.one(self.first(batch[0]))), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.last(self.one(self.first(batch[0]))), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD([*self.first.parameters(), *self.one.parameters(), *self.last.parameters()], lr=0.5)


class OnlyBlocks(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), Block())

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_root_without_weights_of_its_own_trains(tmp_path):
    def run():
        trainer = fp.Trainer(
            accelerator="cpu", strategy="fsdp", logger=False, enable_progress_bar=False, max_steps=2,
            default_root_dir=tmp_path, enable_model_summary=False,
        )  # fmt: skip
        model = OnlyBlocks()
        trainer.fit(model, [torch.ones(4, 16)] * 2)
        return trainer.global_step, [name for name, layer in model.named_modules() if isinstance(layer, FSDPModule)]

    assert ranks.run(run, 2) == [(2, ["", "net.0", "net.1"])] * 2


class HalfWeights(fp.Callback):
    """Validates with half of each weight."""

    @torch.no_grad()
    def on_validation_start(self, trainer, pl_module):
        self.kept = [parameter.clone() for parameter in pl_module.parameters()]
        for parameter in pl_module.parameters():
            parameter.mul_(0.5)

    @torch.no_grad()
    def on_validation_end(self, trainer, pl_module):
        for parameter, kept in zip(pl_module.parameters(), self.kept, strict=True):
            parameter.copy_(kept)


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_weights_that_a_callback_exchanges_for_validation_are_not_trained(tmp_path, sharding):
    def run(root, strategy, batch_size):
        torch.manual_seed(0)
        model = StepsWithoutForward()
        model.one.dropout.p = 0.0
        trainer = fp.Trainer(
            accelerator="cpu", strategy=strategy, logger=False, enable_progress_bar=False, max_epochs=3, seed=1,
            default_root_dir=root, enable_model_summary=False, callbacks=[HalfWeights()], val_check_interval=2,
        )  # fmt: skip
        trainer.fit(model, DataLoader(dataset(64), batch_size), DataLoader(dataset(32), batch_size))
        weights = trainer.parallel.whole(trainer.parallel.state_dict(model))
        return {"weights": weights, "val_loss": trainer.latest_metrics()["val_loss"]}

    alone = run(tmp_path / "alone", "auto", 16)
    first, second = ranks.run(lambda: run(tmp_path / "two", fp.FSDPStrategy({Block}, sharding_strategy=sharding), 8), 2)
    close(alone, first)
    assert abs(first["val_loss"] - alone["val_loss"]) < 1e-5
    assert same(first, second)


def test_groups_of_ranks_shard_and_resume_bit_for_bit(tmp_path):
    strategy = fp.FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    alone = train(tmp_path / "alone", "auto", 16, 2)
    whole = ranks.run(lambda: train(tmp_path / "whole", strategy, 4, 2), 4)
    assert whole[0]["placements"] == {(Replicate(), Shard(0))}
    close(alone, whole[0])

    ranks.run(lambda: train(tmp_path / "cut", strategy, 4, 1), 4)
    Net().load_state_dict(checkpoint.load(checkpoint.newest([tmp_path / "cut" / "checkpoints"]))["state_dict"])
    rest = ranks.run(lambda: train(tmp_path / "cut", strategy, 4, 2, ckpt_path="last"), 4)
    assert all(same(rank, whole[0]) for rank in rest)


def test_in_a_mixed_precision_weights_are_gathered_in_16_bits_and_kept_in_32(tmp_path):
    strategy = fp.FSDPStrategy(auto_wrap_policy={Block})
    alone = train(tmp_path / "alone", "auto", precision="bf16-mixed")
    first, second = ranks.run(lambda: train(tmp_path / "two", strategy, 8, precision="bf16-mixed"), 2)
    assert first["dtypes"] == {"torch.float32"}
    assert first["calls"].keys() == {"forward", "torch.bfloat16"}
    assert same(first, second)
    close(alone, first, rtol=0.1, atol=0.02)


def test_a_mixed_precision_policy_is_used_as_it_is_given(tmp_path):
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)
    strategy = fp.FSDPStrategy(auto_wrap_policy={Block}, mixed_precision=policy)

    class Casts(Net):
        def training_step(self, batch, batch_idx):
            assert batch[0].dtype == torch.float64
            return F.cross_entropy(self(batch[0]), batch[1])

    def run():
        trainer = fp.Trainer(
            accelerator="cpu", strategy=strategy, logger=False, enable_progress_bar=False, max_steps=1,
            default_root_dir=tmp_path, enable_model_summary=False,
        )  # fmt: skip
        Block.calls.clear()
        trainer.fit(Casts(), DataLoader(dataset(16), 4))
        return dict(Block.calls)

    assert ranks.run(run, 2) == [{"forward": 2, "torch.float64": 2}] * 2


@pytest.mark.parametrize("processes", [1, 2])
def test_layers_that_keep_no_activations_run_twice_and_change_no_bit(tmp_path, processes):
    times_of_mode = {"full": 2.0, "op": 2.0, 2: 1.5}

    def train_each():
        def run(name, **options):
            strategy = fp.FSDPStrategy(auto_wrap_policy={Block}, **options)
            return train(tmp_path / name, strategy, 16 // processes, dropout=0.3)

        checkpointed = {"activation_checkpointing_policy": {Block}}
        return run("kept"), {
            mode: run(f"again-{mode}", **checkpointed, activation_checkpointing_mode=mode) for mode in times_of_mode
        }

    kept, of_mode = ranks.run(train_each, processes)[0]
    for mode, times in times_of_mode.items():
        recomputed = of_mode[mode]
        assert same(kept, recomputed)
        assert recomputed["calls"]["forward"] == times * kept["calls"]["forward"]


class Operations(TorchDispatchMode):
    """Counts the operations that are computed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Attending(nn.Module):
    """A layer with each kind of operation: products, attention, a norm, an activation, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(self.dropout(F.gelu(attended.transpose(1, 2).flatten(2))))


# Without the last product, whose output the backward pass doesn't need.
PRODUCTS = {"addmm", "_scaled_dot_product_flash_attention_for_cpu"}
BETWEEN = {"native_layer_norm", "gelu"}


def backward_of(mode, blocks=1):
    """Gradients of some blocks, and the operations of their backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attending() for _ in range(blocks)))
    if mode is not None:
        checkpoint_activations(list(model), mode)
    x = torch.randn(2, 3, 8, requires_grad=True)
    loss = model(x).square().sum()
    with Operations() as operations:
        loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())], operations.counts


@pytest.mark.parametrize(
    ("mode", "blocks", "products", "between"), [("full", 1, 1, 1), ("op", 1, 0, 1), (2, 5, 2, 2), (3, 5, 1, 1)]
)
def test_a_mode_chooses_which_operations_run_again_and_changes_no_bit(mode, blocks, products, between):
    kept, plain = backward_of(None, blocks)
    gradients, operations = backward_of(mode, blocks)
    assert all(torch.equal(one, other) for one, other in zip(kept, gradients, strict=True))
    again = operations - plain
    assert {name: again[name] for name in PRODUCTS} == dict.fromkeys(PRODUCTS, products)
    assert {name: again[name] for name in BETWEEN} == dict.fromkeys(BETWEEN, between)


def test_without_gradients_nothing_is_computed_again():
    block = Block()
    checkpoint_activations([block])
    checkpoint_activations([block])
    Block.calls.clear()
    with torch.no_grad():
        block(torch.ones(1, 16))
    assert Block.calls["forward"] == 1
    block(torch.ones(1, 16, requires_grad=True)).sum().backward()
    assert Block.calls["forward"] == 3


def test_a_layer_that_keeps_no_activations_is_copied_and_pickled():
    block = Block().eval()
    checkpoint_activations([block])
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        twin.up.weight.data.zero_()
        assert not torch.equal(twin(torch.ones(1, 16)), block(torch.ones(1, 16)))
        assert twin.state_dict().keys() == Block().state_dict().keys()


def test_a_forward_pass_that_the_user_has_put_on_a_layer_stays():
    block = Block()
    block.forward = lambda x: 2 * x
    checkpoint_activations([block])
    assert torch.equal(block(torch.ones(2, requires_grad=True)), torch.full((2,), 2.0))


def units_of(model, types):
    return layers_of(model, fp.FSDPStrategy(auto_wrap_policy=types), "auto_wrap_policy")


def test_layers_are_found_innermost_first():
    model = Net()
    assert units_of(model, {Block, nn.Linear})[-1] is model.first
    position = {id(layer): place for place, layer in enumerate(units_of(model, {Block, nn.Linear}))}
    assert position[id(model.one)] > position[id(model.one.up)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_wrap_policy": Block}, r"auto_wrap_policy=.*expected a set of layer types"),
        ({"auto_wrap_policy": "Block"}, r"auto_wrap_policy='Block'\): expected a set"),
        ({"activation_checkpointing_policy": [3]}, r"activation_checkpointing_policy=\[3\]\): expected a set"),
        ({"sharding_strategy": "HYBRID"}, r"sharding_strategy='HYBRID'\) is unknown\. Did you mean .*HYBRID_SHARD"),
        ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2,)}, r"device_mesh=\(2,\)\): expected two counts"),
        ({"activation_checkpointing_mode": "ops"}, r"mode='ops'\): expected \"full\", \"op\", or a number"),
        ({"activation_checkpointing_mode": 0}, r"mode=0\): expected"),
        ({"activation_checkpointing_mode": 2}, r"mode=2\) needs activation_checkpointing_policy"),
        ({"device_mesh": (1, 2)}, r'device_mesh=\(1, 2\)\) needs sharding_strategy="HYBRID_SHARD"'),
        (
            {"mixed_precision": "bf16"},
            r"mixed_precision='bf16'\): expected a torch.distributed.fsdp.MixedPrecisionPolicy",
        ),
    ],
)
def test_options_without_meaning_are_refused(options, message):
    with pytest.raises(fp.ConfigError, match=message):
        fp.FSDPStrategy(**options)


def test_a_type_that_no_layer_has_is_refused_with_those_that_there_are(tmp_path):
    strategy = fp.FSDPStrategy(activation_checkpointing_policy={"Blok"})
    with pytest.raises(fp.ConfigError, match=r"Net has no layer of type Blok\. It has Block, Dropout, Linear"):
        train(tmp_path, strategy)


def test_groups_must_hold_all_ranks(tmp_path):
    strategy = fp.FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    with pytest.raises(fp.ConfigError, match=r"2 groups of 2 ranks make 4, and the run has 1"):
        train(tmp_path, strategy)


def test_groups_are_compared_with_the_ranks_that_a_trainer_will_start(tmp_path):
    strategy = fp.FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))
    fp.Trainer(accelerator="cpu", devices=4, strategy=strategy, default_root_dir=tmp_path, max_epochs=1)


def test_the_text_of_options_is_the_same_in_each_process():
    types = {Block, nn.Linear, "Embedding"}
    text = "FSDPStrategy(auto_wrap_policy={Block, Embedding, Linear}, sharding_strategy=SHARD_GRAD_OP)"
    assert repr(fp.FSDPStrategy(types, sharding_strategy="SHARD_GRAD_OP")) == text
    assert repr(fp.FSDPStrategy()) == "FSDPStrategy()"


def test_types_of_one_name_are_all_found():
    class Linear(nn.Module):
        """Another one."""

    model = nn.Sequential(Linear(), nn.Linear(1, 1))
    assert units_of(model, {Linear, nn.Linear}) == [model[1], model[0]]
    assert units_of(model, {nn.Linear}) == [model[1]]
    assert units_of(model, {"Linear"}) == [model[1], model[0]]


def test_ranks_with_different_options_refuse_to_train(tmp_path):
    def run():
        types = {Block} if os.environ["RANK"] == "0" else {Block, nn.Linear}
        with pytest.raises(fp.ConfigError, match=r"strategy.*auto_wrap_policy=\{Block, Linear\}"):
            train(tmp_path, fp.FSDPStrategy(auto_wrap_policy=types))
        return True

    assert ranks.run(run, 2) == [True, True]


def test_a_module_that_is_sharded_in_another_way_is_refused(tmp_path):
    others = [
        ({"strategy": fp.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")}, r"This trainer has .*SHARD_GRAD_OP"),
        ({"strategy": "fsdp", "precision": "bf16-mixed"}, r"This trainer has .*torch\.bfloat16"),
    ]

    def trainer(**settings):
        return fp.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, max_steps=1, enable_model_summary=False,
            default_root_dir=tmp_path, enable_checkpointing=False, **settings,
        )  # fmt: skip

    def run():
        for other, message in others:
            model = OnlyBlocks()
            trainer(strategy="fsdp").fit(model, [torch.ones(4, 16)])
            trainer(strategy="fsdp").fit(model, [torch.ones(4, 16)])
            with pytest.raises(fp.ConfigError, match=message):
                trainer(**other).fit(model, [torch.ones(4, 16)])
        return True

    assert ranks.run(run, 2) == [True, True]


def test_xla_has_no_such_options(tmp_path):
    with pytest.raises(
        fp.ConfigError, match=r'strategy=FSDPStrategy\(.* doesn.t go with accelerator="xla".* use "fsdp"'
    ):
        fp.Trainer(accelerator="xla", strategy=fp.FSDPStrategy(auto_wrap_policy={Block}), default_root_dir=tmp_path)
