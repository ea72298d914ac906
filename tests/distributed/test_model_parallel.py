"""Tensor parallelism: a grid of ranks gets the result of one process with the whole model."""

from __future__ import annotations

import copy
import functools
import os
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchmetrics
from models import ranks
from models.gpt import HEADS, WIDTH, Attention, Gpt, Text, texts
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import DataLoader

import footplate as fp
from footplate.distributed.world import World

from .common import Plain, equal, loader, make, same

# Two ranks work on the same rows, and four ranks are two such groups.
GRIDS = {2: 1, 4: 2}
TWO = fp.ModelParallelStrategy(tensor_parallel_size=2)


# Three global batches of 16 rows, the last of three rows, and two of validation, the last of one row.
ROWS, VAL_ROWS = 35, 17


def train(root, batch_size, strategy=TWO, epochs=1, ckpt_path=None, dropout=0.0, module=Text, **settings):
    """Train, and return what one rank can tell of it."""
    torch.manual_seed(0)
    trainer, model = make(root, strategy=strategy, max_epochs=epochs, **settings), module(dropout)
    batches = DataLoader(texts(ROWS), batch_size, shuffle=True), DataLoader(texts(VAL_ROWS), batch_size)
    trainer.fit(model, *batches, ckpt_path=ckpt_path)
    state = trainer.parallel.state_dict(model)
    return {
        "weights": trainer.parallel.whole(state),
        "cut": {name: tuple(value.placements) for name, value in state.items() if isinstance(value, DTensor)},
        "local": {name: value.to_local().numel() for name, value in state.items() if isinstance(value, DTensor)},
        # The value of a step is that of a rank's own rows.
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if "_step" not in name},
        "step": trainer.global_step,
        "rank": (trainer.global_rank, trainer.world_size),
    }


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
CLIPPED_BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


def trainings(world):
    """Arguments of `train` for each training of a grid."""
    if world == 2:
        return {"plain": {}, "dropout": {"dropout": 0.3}}
    return {
        "plain": {"epochs": 2},
        "accumulated and clipped": CLIPPED,
        "clipped by value": CLIPPED_BY_VALUE,
        "dropout": {"dropout": 0.3},
        "averaged": {"callbacks": [fp.EMAWeightAveraging(decay=0.8)]},
        "in 16 bits": {"precision": "bf16-mixed"},
        "by hand": {"module": ByHand},
        "by user": {"module": ByUser, "gradient_clip_val": 1e9},
        "on meta": {"module": OnMeta},
        "cut on meta": {"module": CutOnMeta},
        "loss parallel": {"module": UnderLossParallel},
    }


@pytest.fixture(scope="module")
def learned(tmp_path_factory, table):
    """A function that returns what each rank of a grid has learned and counted. The ranks of a grid start once."""

    @functools.cache
    def of_grid(world):
        root, batch_size = tmp_path_factory.mktemp("grid"), 16 // GRIDS[world]

        def train_each():
            results = {
                name: train(root / name, batch_size, **arguments) for name, arguments in trainings(world).items()
            }
            results["counts"] = count(root / "counts", table, batch_size, TWO)
            if world == 4:
                results["predictions"] = predict(root / "predictions", TWO), root / "predictions"
                results["refusal"] = refusal_of_a_whole_weight(root / "refused")
            return results

        return ranks.run(train_each, world, timeout_s=120.0 * len(trainings(world)))

    return of_grid


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What the first of two sharded ranks has learned in some trainings of the grid. The ranks start once."""
    root = tmp_path_factory.mktemp("sharded")

    def train_each():
        names = ("dropout", "in 16 bits", "on meta")
        return {name: train(root / name, 8, "fsdp", **trainings(4)[name]) for name in names}

    return ranks.run(train_each, 2, timeout_s=300.0)[0]


@pytest.mark.parametrize(
    ("name", "world"), [("plain", 2), ("plain", 4), ("accumulated and clipped", 4), ("clipped by value", 4)]
)
def test_a_grid_learns_what_one_process_learns(tmp_path, learned, world, name):
    alone = train(tmp_path / "alone", 16, "auto", **trainings(world)[name])
    results = [of_rank[name] for of_rank in learned(world)]
    for rank, result in enumerate(results):
        assert result["rank"] == (rank, world)
        same(alone["weights"], result["weights"])
        equal(results[0]["weights"], result["weights"])
        assert result["metrics"] == results[0]["metrics"]
        assert result["step"] == alone["step"]
        for metric, value in alone["metrics"].items():
            assert result["metrics"][metric] == pytest.approx(value, rel=1e-4), metric
    assert results[0]["metrics"]["rows"] == ROWS
    assert results[0]["metrics"]["val_rows"] == VAL_ROWS


def test_each_rank_holds_a_part_of_the_planned_layers(learned):
    result = learned(4)[0]["plain"]
    weights, local = result["weights"], result["local"]
    for name in ("net.tokens.weight", "net.blocks.0.attention.query.weight", "net.blocks.1.down.weight"):
        assert local[name] == weights[name].numel() // 4, name
    # Without a style, a layer is only shared out over the groups.
    assert local["net.norm.weight"] == weights["net.norm.weight"].numel() // 2
    assert torch.equal(weights["net.tokens.weight"], weights["net.head.weight"])


def test_dropout_draws_the_same_numbers_on_the_ranks_of_a_group(tmp_path, learned, sharded):
    alone = train(tmp_path / "alone", 16, "auto", dropout=0.3)
    for of_rank in learned(2):
        same(alone["weights"], of_rank["dropout"]["weights"])

    for of_rank in learned(4):
        same(sharded["dropout"]["weights"], of_rank["dropout"]["weights"])


def test_averaged_weights_are_those_of_one_process(tmp_path, learned):
    alone = train(tmp_path / "alone", 16, "auto", callbacks=[fp.EMAWeightAveraging(decay=0.8)])
    for of_rank in learned(4):
        result = of_rank["averaged"]
        same(alone["weights"], result["weights"])
        assert result["metrics"]["val_loss"] == pytest.approx(alone["metrics"]["val_loss"], rel=1e-4)


def test_in_a_mixed_precision_a_grid_learns_what_sharded_ranks_learn(learned, sharded):
    expected, result = sharded["in 16 bits"], learned(4)[0]["in 16 bits"]
    assert result["metrics"]["val_loss"] == pytest.approx(expected["metrics"]["val_loss"], rel=0.02)
    for name, value in expected["weights"].items():
        # Sums of parts are rounded to 16 bits, and a step of Adam is about its learning rate, 0.01.
        torch.testing.assert_close(value, result["weights"][name], rtol=0, atol=0.03, msg=name)
        assert result["weights"][name].dtype is torch.float32


class ByHand(Text):
    """Clips and steps itself."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


def test_manual_optimisation_clips_over_the_whole_grid(tmp_path, learned):
    alone = train(tmp_path / "alone", 16, "auto", module=ByHand)
    for of_rank in learned(4):
        same(alone["weights"], of_rank["by hand"]["weights"])


class ByUser(Text):
    """Cuts and shards its layers itself, as programs for Lightning's ModelParallelStrategy do."""

    def configure_model(self):
        mesh = self.device_mesh
        if mesh is None or mesh.size() == 1:
            return
        parallelize_module(self.net, mesh["tensor_parallel"], self.net.tensor_parallel_plan())
        self.net.head.weight = self.net.tokens.weight
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.net, mesh=mesh["data_parallel"])


def test_a_module_may_cut_and_shard_itself_in_configure_model(tmp_path, learned):
    alone = train(tmp_path / "alone", 16, "auto", module=ByUser)
    for of_rank in learned(4):
        result = of_rank["by user"]
        same(alone["weights"], result["weights"])
        assert "Shard(dim=0)" in repr(result["cut"]["net.blocks.0.up.weight"])


class OnMeta(Text):
    """Builds its net on the meta device."""

    def __init__(self, dropout):
        fp.Module.__init__(self)

    def configure_model(self):
        with torch.device("meta"):
            self.net = Gpt()


class CutOnMeta(OnMeta):
    """Cuts it there, too."""

    def configure_model(self):
        super().configure_model()
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], self.net.tensor_parallel_plan())
        self.net.head.weight = self.net.tokens.weight


def test_numbers_are_those_of_sharded_ranks_also_if_layers_are_cut_on_the_meta_device(learned, sharded):
    for of_rank in learned(4):
        for name in ("on meta", "cut on meta"):
            same(sharded["on meta"]["weights"], of_rank[name]["weights"])


class UnderLossParallel(Text):
    """Keeps the logits in parts, and computes the loss on the parts."""

    def configure_model(self):
        if self.device_mesh is not None:
            plan = self.net.tensor_parallel_plan()
            plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
            self.net.head.weight = self.net.tokens.weight

    def training_step(self, batch, batch_idx):
        with loss_parallel():
            return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        pass

    def backward(self, *arguments):
        with loss_parallel():
            super().backward(*arguments)


def test_a_loss_may_be_computed_on_the_parts_of_the_logits(tmp_path, learned):
    alone = train(tmp_path / "alone", 16, "auto", module=Text)
    for of_rank in learned(4):
        result = of_rank["loss parallel"]
        same(alone["weights"], result["weights"])
        assert result["metrics"]["train_loss_epoch"] == pytest.approx(alone["metrics"]["train_loss_epoch"], rel=1e-4)


def predict(root, strategy):
    """Write predictions to `root / "out"`, and return the number of rows."""
    torch.manual_seed(0)
    trainer, model = make(root, strategy=strategy), Text()
    return trainer.predict(model, DataLoader(texts(33), 4), output=root / "out").num_rows


def test_predictions_are_written_once(tmp_path, learned):
    assert predict(tmp_path, "auto") == 33
    of_ranks = [of_rank["predictions"] for of_rank in learned(4)]
    assert [count for count, _ in of_ranks] == [33] * 4

    alone, grid = (pq.read_table(path).to_pylist() for path in (tmp_path / "out", of_ranks[0][1] / "out"))
    assert sorted(tuple(row.values()) for row in alone) == sorted(tuple(row.values()) for row in grid)


class Counting(Text):
    """Counts rows by a torchmetrics object, which it logs, and by another one, which it computes."""

    def __init__(self):
        super().__init__()
        self.logged, self.computed = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        ids = batch["id"]
        self.logged.update(len(ids))
        self.computed.update(len(ids))
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        tokens = (ids[:, None] * torch.arange(1, 9)) % 32
        return self.loss(tokens)

    def on_train_epoch_end(self):
        self.log("computed", self.computed.compute())
        self.computed.reset()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The path of a table."""
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    pq.write_table(pa.table({"id": list(range(ROWS))}), path)
    return str(path)


def count(root, table, batch_size, strategy):
    """Train on a table, and return the weights, the metrics and the number of steps."""
    torch.manual_seed(0)
    trainer, model = make(root, strategy=strategy, max_epochs=1), Counting()
    trainer.fit(model, fp.Loader(fp.Table(table), batch_size))
    copy.deepcopy(model.logged)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return trainer.parallel.whole(trainer.parallel.state_dict(model)), metrics, trainer.global_step


@pytest.mark.parametrize("world", GRIDS)
def test_each_group_reads_its_share_of_a_table_and_counts_it_once(tmp_path, learned, table, world):
    alone, metrics, steps = count(tmp_path, table, 16, "auto")
    assert metrics == {"logged": ROWS, "computed": ROWS}
    for of_rank in learned(world):
        weights, counted, made = of_rank["counts"]
        same(alone, weights)
        assert (counted, made) == (metrics, steps)


def test_a_trainer_starts_the_ranks_and_brings_the_weights_home(tmp_path):
    alone = train(tmp_path / "alone", 16, "auto")
    home = train(tmp_path / "launched", 8, devices=4)
    same(alone["weights"], home["weights"])
    assert not home["cut"]


def test_on_one_rank_the_grid_has_one_rank(tmp_path):
    alone = train(tmp_path / "alone", 16, "auto")
    # In a process of its own, which keeps torch's process group.
    (result,) = ranks.run(lambda: train(tmp_path / "one", 16, fp.ModelParallelStrategy()), 1)
    same(alone["weights"], result["weights"])


# What is refused


class Own:
    """Batches that each rank reads by itself."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter([torch.stack(texts(8)) + self.rank])


def of_rank(path):
    return Own(int(os.environ["RANK"]))


def beside_a_shared_loader(path):
    return {"shared": DataLoader(texts(), 8), "own": of_rank(path)}


def table_by_rank(path):
    return fp.Loader(fp.Table(path), 8, world=World.from_environ())


def refuse_different_rows(root, path):
    for loader_of in (of_rank, beside_a_shared_loader, table_by_rank):
        with pytest.raises(fp.DataError, match=r"Ranks 0 and 1 belong to one tensor-parallel group, .* different rows"):
            make(root, strategy=TWO).fit(Text(), loader_of(path))


class ScaledAttention(Attention):
    """Scales the features of each head. Each rank uses all of the scale on its own heads."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH // HEADS))

    def heads(self, layer, x):
        return super().heads(layer, x) * self.scale


class Scaled(Text):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.net.blocks[1].attention = ScaledAttention()


def refusal_of_a_whole_weight(root):
    trainer = make(root, strategy=TWO, max_epochs=1)
    # Each fit has a model of its own, which may have such a weight.
    trainer.fit(Text(), DataLoader(texts(16), 8))
    with pytest.raises(fp.ConfigError) as refused:
        trainer.fit(Scaled(0.0), DataLoader(texts(16), 8))
    return str(refused.value)


def test_a_whole_weight_that_is_used_on_parts_is_refused(learned):
    for of_rank in learned(4):
        assert re.search(r"net.blocks.1.attention.scale is whole .* gradients differ", of_rank["refusal"])


class Planned(Text):
    """Has a plan that can't be followed."""

    plan: Any = None

    def tensor_parallel_plan(self):
        return self.plan


def planned(*styles):
    return type("Planned", (Planned,), {"plan": dict(styles) if styles else None})


REFUSED_PLANS = [
    (planned(("net.blocks.*.upp", ColwiseParallel())), r'names "net.blocks.\*.upp", and there is no such layer'),
    (
        planned(("net.blocks.*.up", ColwiseParallel()), ("net.blocks.1.up", ColwiseParallel())),
        r'two styles for net.blocks.1.up, by "net.blocks.\*.up" and by "net.blocks.1.up"',
    ),
    (planned(("net.norm", "colwise")), r"has 'colwise' for \"net.norm\": expected a ParallelStyle"),
    (planned(), r"tensor_parallel_plan\(\) returned NoneType: expected a dict"),
    (planned(("net.tokens", ColwiseParallel())), r"share one parameter, .* different ways: net.tokens.weight"),
]


def refuse_plans(root):
    for module, message in REFUSED_PLANS:
        with pytest.raises(fp.ConfigError, match=message):
            train(root, 8, module=module)


def refuse_no_plan(root):
    with pytest.raises(fp.ConfigError, match=r"Plain has no plan that says how its layers are cut. Define Plain"):
        make(root, strategy=TWO).fit(Plain(), loader())


def test_different_rows_and_plans_that_cannot_be_followed_are_refused(tmp_path, table):
    def fit():
        refuse_different_rows(tmp_path, table)
        refuse_plans(tmp_path)
        refuse_no_plan(tmp_path)

    ranks.run(fit, 2)


class Odd(planned(("net.blocks.*.up", ColwiseParallel()))):
    """Has layers that three ranks can't cut into equal parts."""

    def __init__(self, dropout):
        super().__init__(dropout)
        for block in self.net.blocks:
            block.up, block.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)


def test_parts_of_different_sizes_are_refused(tmp_path):
    def fit():
        with pytest.raises(fp.ConfigError, match=r"tensor_parallel_size=3: net.blocks.\d.up.\w+ .* divided by 3"):
            train(tmp_path, 8, fp.ModelParallelStrategy(1, 3), module=Odd)

    ranks.run(fit, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": fp.ModelParallelStrategy(2, 2), "devices": 2}, r"2 group\(s\) of 2 rank\(s\) make 4, .* has 2"),
        ({"strategy": fp.ModelParallelStrategy(tensor_parallel_size=2), "devices": 3}, r"make 2, and the run has 3"),
        ({"strategy": TWO, "devices": 4, "min_devices": 2}, r"min_devices=2 doesn't go with ModelParallelStrategy"),
        ({"strategy": TWO, "devices": 2, "logical_ranks": 2}, r"each process must hold the whole model"),
        ({"strategy": TWO, "accelerator": "xla"}, r"doesn't go with accelerator"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_any_work(tmp_path, arguments, message):
    with pytest.raises(fp.ConfigError, match=message):
        fp.Trainer(**{"accelerator": "cpu", "default_root_dir": tmp_path, "max_epochs": 1, **arguments})


def test_sizes_are_counts_or_auto():
    with pytest.raises(fp.ConfigError, match=r"tensor_parallel_size=0\): expected \"auto\", or a count"):
        fp.ModelParallelStrategy(tensor_parallel_size=0)
    assert fp.ModelParallelStrategy().sizes(8, 4) == (2, 4)
    assert fp.ModelParallelStrategy(data_parallel_size=4).sizes(8, 8) == (4, 2)
    assert TWO.sizes(8, 8) == (4, 2)
    assert repr(TWO) == "ModelParallelStrategy(tensor_parallel_size=2)"
