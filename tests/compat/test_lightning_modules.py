"""Published LightningModules and data modules, unchanged on our trainer."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer, WikiText2
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    ManualOptimBoringModel,
)
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.utilities import CombinedLoader
from models.finetunes import BertClassifier, ImagesDataModule, LitClassificationModel, sentences
from models.optimising import Gan
from models.zoo import Plain, loaders
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

import footplate as fp
from footplate.compat.lightning import load_from_checkpoint


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def test_boring_model_with_its_own_loaders_goes_through_every_stage(make_trainer: Any) -> None:
    module, runner = BoringModel(), make_trainer(max_epochs=1)
    before = weights(module)

    runner.fit(module)

    assert changed(before, module) == {"layer.weight", "layer.bias"}
    assert runner.global_step == 64
    assert runner.validate(module, verbose=False) == [{}]
    assert runner.test(module, verbose=False) == [{}]
    assert [prediction.shape for prediction in runner.predict(module)] == [(1, 2)] * 64


@pytest.mark.parametrize("data", [BoringDataModule, BoringDataModuleNoLen])
def test_boring_data_modules_feed_every_stage(make_trainer: Any, data: type) -> None:
    module, runner = BoringModel(), make_trainer(max_epochs=1, limit_train_batches=8, limit_val_batches=2)

    runner.fit(module, datamodule=data())

    assert runner.global_step == 8
    runner.validate(module, datamodule=data(), verbose=False)
    runner.test(module, datamodule=data(), verbose=False)
    assert len(runner.predict(module, datamodule=data())) == 64


def test_boring_model_with_manual_optimisation(make_trainer: Any) -> None:
    module, runner = ManualOptimBoringModel(), make_trainer(max_epochs=1)
    before = weights(module)

    runner.fit(module)

    assert changed(before, module) == {"layer.weight", "layer.bias"}
    assert runner.global_step == 64


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WikiText2:
    """A replacement for the file that Lightning's language models download: few words, in a learnable order."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    words = [f"w{index % 11}" for index in range(800)]
    Path("data/wikitext-2.txt").write_text("\n".join(" ".join(words[at : at + 10]) for at in range(0, 800, 10)))
    return WikiText2(download=False)


def test_lightning_transformer_learns_its_text(make_trainer: Any, text: WikiText2) -> None:
    torch.manual_seed(0)
    module, runner = LightningTransformer(vocab_size=text.vocab_size), make_trainer(max_epochs=1)

    def loss() -> float:
        inputs, target = text[0]
        with torch.no_grad():
            output = module.eval()(inputs[None], target[None])
        return torch.nn.functional.nll_loss(output, target).item()

    before = loss()
    module.train()
    runner.fit(module)

    assert runner.global_step == len(text)
    assert loss() < before - 0.5


def test_lightning_lstm_carries_its_hidden_state(make_trainer: Any, text: WikiText2) -> None:
    module, runner = LightningLSTM(vocab_size=text.vocab_size), make_trainer(max_epochs=1, limit_train_batches=1)

    runner.fit(module)

    assert module.hidden is None  # its on_train_epoch_end
    assert math.isfinite(runner.callback_metrics["train_loss"])


def test_timm_fine_tune_trains_its_head_alone_and_resumes_bit_for_bit(make_trainer: Any, tmp_path: Path) -> None:
    def run(directory: str, epochs: int, resume: str | None = None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = LitClassificationModel(class_count=3)
        runner = make_trainer(max_epochs=epochs, default_root_dir=tmp_path / directory)
        runner.fit(module, datamodule=ImagesDataModule(), ckpt_path=resume)
        return module, runner

    torch.manual_seed(0)
    before = weights(LitClassificationModel(class_count=3))
    whole, runner = run("whole", 2)
    run("parts", 1)
    resumed, _ = run("parts", 2, "last")

    heads = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    assert {name for name in changed(before, whole) if name in dict(whole.named_parameters())} == heads
    assert set(runner.callback_metrics) == {"train_loss", "train_loss_step", "train_loss_epoch", "val_acc", "val_loss"}
    assert changed(weights(whole), resumed) == set()
    predictions = runner.predict(whole, datamodule=ImagesDataModule())
    assert [tuple(prediction.shape) for prediction in predictions] == [(8, 3)] * 3


def test_hugging_face_fine_tune_learns(make_trainer: Any) -> None:
    torch.manual_seed(0)
    module, runner = BertClassifier(), make_trainer(max_epochs=12)

    runner.fit(module, sentences(), sentences())

    assert runner.callback_metrics["val_acc"] >= 0.9
    assert module.lr_schedulers().get_last_lr() == [0.0, 0.0]  # the schedule ran out with the steps


def test_gan_trains_both_its_networks(make_trainer: Any) -> None:
    module, runner = Gan(), make_trainer(max_epochs=1)
    before = weights(module)

    runner.fit(module, *loaders())

    assert changed(before, module) == set(before)
    assert runner.global_step == 20  # two optimizers, ten batches


def test_a_module_inside_a_module_may_log(make_trainer: Any) -> None:
    class Outer(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Plain()])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.parts[0].training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return self.parts[0].configure_optimizers()

    runner = make_trainer(max_epochs=1)
    runner.fit(Outer(), loaders()[0])

    assert "train_loss" in runner.callback_metrics


def test_checkpoints_are_read_back_into_the_users_class(make_trainer: Any) -> None:
    module, runner = LitClassificationModel(class_count=3, learning_rate=0.5), make_trainer(max_epochs=1)
    runner.fit(module, datamodule=ImagesDataModule())
    path = Path(runner.checkpoint_callback.best_model_path)

    loaded = load_from_checkpoint(LitClassificationModel, path)
    assert loaded.hparams.learning_rate == 0.5
    assert changed(weights(module), loaded) == set()


def test_a_trained_module_is_copied_pickled_and_exported_as_before(make_trainer: Any) -> None:
    module, runner = Plain(), make_trainer(max_epochs=1)
    runner.fit(module, *loaders())
    example = torch.ones(2, 8)
    expected = module.eval()(example)

    for copied in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        module.to_torchscript(),
        module.to_torchscript(method="trace", example_inputs=example),
    ):
        assert torch.equal(copied(example), expected)


def test_modes_of_the_data_module_hooks(make_trainer: Any) -> None:
    calls: list[str] = []

    class Data(BoringDataModule):
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append(f"setup {stage}")
            super().setup(stage)

        def teardown(self, stage: str) -> None:
            calls.append(f"teardown {stage}")

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("batch")
            return batch

        def on_exception(self, exception: BaseException) -> None:
            calls.append(f"on_exception {exception}")

    class Fails(BoringModel):
        def on_train_epoch_end(self) -> None:
            raise RuntimeError("mine")

    runner = make_trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    data = Data()
    with pytest.raises(RuntimeError, match="mine"):
        runner.fit(Fails(), datamodule=data)

    assert calls == ["prepare_data", "setup fit", "batch", "batch", "on_exception mine", "teardown fit"]
    assert data.trainer is runner


def test_validation_sees_evaluation_mode_and_no_gradients_to_its_very_end(make_trainer: Any) -> None:
    seen: list[tuple[str, bool, bool]] = []

    class Looks(Plain):
        def on_validation_start(self) -> None:
            seen.append(("start", self.training, torch.is_grad_enabled()))

        def on_validation_end(self) -> None:
            seen.append(("end", self.training, torch.is_grad_enabled()))

        def on_train_epoch_end(self) -> None:
            seen.append(("epoch", self.training, torch.is_grad_enabled()))

    make_trainer(max_epochs=1, num_sanity_val_steps=0).fit(Looks(), *loaders())

    assert seen == [("start", False, False), ("end", False, False), ("epoch", True, True)]


def test_a_plain_torch_module_is_told_what_it_lacks(make_trainer: Any) -> None:
    with pytest.raises(
        fp.ConfigError, match=r"plain torch\.nn\.Module: it has no training_step\(\) and configure_optimizers\(\)"
    ):
        make_trainer().fit(nn.Linear(2, 2), loaders()[0])


COMBINED = {
    "dict": lambda short, long: {"a": short, "b": long},
    "list": lambda short, long: [short, (long, short)],
    **{
        mode: lambda short, long, mode=mode: CombinedLoader({"a": [short], "b": long}, mode)
        for mode in ("min_size", "max_size_cycle", "max_size")
    },
}


@pytest.mark.parametrize("combine", COMBINED.values(), ids=list(COMBINED))
def test_several_loaders_train_and_evaluate_as_with_lightning(make_trainer: Any, tmp_path: Path, combine: Any) -> None:
    class Several(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = nn.Linear(2, 1), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            tensors = [leaf for leaf in tree_flatten(batch)[0] if leaf is not None]
            return sum(self.net(tensor).square().mean() for tensor in tensors)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append((dataloader_idx, batch_idx, str(batch)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def data() -> Any:
        rows = torch.arange(12.0).reshape(6, 2) / 12
        return combine(DataLoader(rows[:2]), DataLoader(rows, 2))  # pyright: ignore[reportArgumentType]

    def lightnings() -> Any:
        return pl.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip

    modules = [Several(), Several()]
    modules[1].load_state_dict(modules[0].state_dict())
    for module, runner in zip(modules, [lightnings(), make_trainer(max_epochs=2)], strict=True):
        runner.fit(module, data(), data())
    assert modules[0].seen == modules[1].seen
    assert all(torch.equal(a, b) for a, b in zip(*(module.parameters() for module in modules), strict=True))


def test_fit_again_begins_a_new_run(make_trainer: Any) -> None:
    runner, module = make_trainer(max_epochs=1), Plain()
    for _ in range(2):
        runner.fit(module, *loaders())
        assert (runner.current_epoch, runner.global_step) == (1, 10)


@pytest.mark.parametrize("form", ["tensor", "dict"])
def test_lightnings_hooks_get_the_outputs_of_a_step_as_a_dict(make_trainer: Any, form: str) -> None:
    seen: list[tuple[str, float]] = []

    class Returns(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                return None
            loss = self.step(batch) * 0 + 4.0
            return loss if form == "tensor" else {"loss": loss}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(("module", float(outputs["loss"]) if outputs else 0.0))

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(("callback", float(outputs["loss"]) if outputs else 0.0))

    run = make_trainer(
        max_epochs=1, limit_train_batches=3, limit_val_batches=0, accumulate_grad_batches=2, callbacks=[Looks()]
    )
    run.fit(Returns())
    assert seen == [(who, loss) for loss in (2.0, 0.0, 2.0) for who in ("callback", "module")]


def test_lightnings_strategy_objects_stand_for_names(make_trainer: Any) -> None:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    given = [DDPStrategy(), DDPStrategy(find_unused_parameters=True), SingleDeviceStrategy(torch.device("cpu"))]
    names = [make_trainer(strategy=strategy).config.strategy for strategy in given]
    assert names == ["ddp", "ddp_find_unused_parameters_true", "auto"]
    mesh = FSDPStrategy(
        auto_wrap_policy={nn.Linear}, activation_checkpointing_policy={nn.ReLU}, sharding_strategy="HYBRID_SHARD",
        device_mesh=(1, 1),
    )  # fmt: skip
    assert make_trainer(strategy=FSDPStrategy()).config.strategy == fp.FSDPStrategy()
    assert make_trainer(strategy=mesh).config.strategy == fp.FSDPStrategy(
        {nn.Linear}, {nn.ReLU}, "HYBRID_SHARD", (1, 1)
    )
    assert make_trainer(strategy=ModelParallelStrategy(1, 1)).config.strategy == fp.ModelParallelStrategy(1, 1)

    compressed = DDPStrategy(ddp_comm_hook=print)
    offloaded, one_by_one = FSDPStrategy(cpu_offload=True), FSDPStrategy(auto_wrap_policy=lambda *args: True)
    for refused, said in (
        (DDPStrategy(static_graph=True), "static_graph"), (compressed, "ddp_comm_hook"), (3, "int"),
        (offloaded, "cpu_offload"), (one_by_one, "auto_wrap_policy"), (FSDPStrategy(limit_all_gathers=False), "limit_all"),
        (FSDPStrategy(sharding_strategy="NO_SHARD"), 'strategy="ddp"'),
        (ModelParallelStrategy(save_distributed_checkpoint=False), "save_distributed_checkpoint"),
    ):  # fmt: skip
        with pytest.raises(fp.ConfigError, match=said):
            make_trainer(strategy=refused)
