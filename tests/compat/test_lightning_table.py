"""Each row of lightning.md and lightning-trainer.md in docs/reference.

A supported feature works as in Lightning, and a refused one has a clear error.

The rows are data (models/table.py). The pages' tables must equal the tables made from the data, and the data must name all
of Lightning's features, so that neither can become outdated.
"""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from models import table
from models.optimising import Backbone, Unfreeze
from models.recording import Record, quiet, trainer_of
from models.table import Row, ids, named
from models.zoo import ByEpoch, Evaluated, Plain, loaders

import footplate as fp
from footplate.core.hooks import overrides


def public(*kinds: type) -> set[str]:
    return {name for kind in kinds for name in vars(kind) if not name.startswith("_") and name.islower()}


# The pages and the data


def test_the_pages_hold_the_tables_that_the_data_makes() -> None:
    texts = [page.read_text() for page in table.DOCS]

    shown = re.findall(r"<!-- table: (.*) -->", "".join(texts))
    assert sorted(shown) == sorted(table.TABLES)
    assert texts == [table.filled(text) for text in texts], "run `make tables`"


def test_the_data_names_all_that_lightning_has() -> None:
    hooks = public(ModelHooks, DataHooks, CheckpointHooks) | {"configure_callbacks", "configure_optimizers"}
    data = public(DataHooks, pl.LightningDataModule) - {"name", "load_from_checkpoint"}
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    lightnings = {
        "Hooks of a LightningModule": hooks,
        "Methods and attributes of a LightningModule": public(pl.LightningModule) - hooks,
        "A LightningDataModule": data,
        "Arguments of the Trainer": arguments,
        "Attributes and methods of the Trainer": public(pl.Trainer),
        "Callbacks": set(pl.callbacks.__all__),
        "Loggers": set(pl.loggers.__all__),
    }

    for name, rows in table.TABLES.items():
        assert lightnings[name] - {row.name for row in rows} == set(), name
        assert len({row.name for row in rows}) == len(rows), name
        assert all(row.note or row.status == "supported" for row in rows), name


# What a module has


def _toggled(module: Any) -> list[bool]:
    optimizer = module.optimizers()
    with module.toggled_optimizer(optimizer):
        inside = [parameter.requires_grad for parameter in module.parameters()]
    module.toggle_optimizer(optimizer)
    module.untoggle_optimizer(optimizer)
    return inside


def _called(value: Any) -> bool:
    return callable(value)


PROBES: dict[str, Any] = {
    "forward": lambda module: module(torch.ones(2, 8)).shape,
    "training_step": lambda module: overrides(module, "training_step"),
    "validation_step": lambda module: overrides(module, "validation_step"),
    "test_step": lambda module: overrides(module, "test_step"),
    "predict_step": lambda module: module.predict_step([torch.ones(2, 8)], 0).shape,
    "log": lambda module: module.log("probe", 1.0, True),
    "log_dict": lambda module: module.log_dict({"probe_a": 1.0, "probe_b": torch.tensor(2.0)}, True),
    "optimizers": lambda module: isinstance(module.optimizers(), torch.optim.Optimizer),
    "lr_schedulers": lambda module: module.lr_schedulers().get_last_lr(),
    "manual_backward": lambda module: _called(module.manual_backward),
    "toggle_optimizer": _toggled,
    "untoggle_optimizer": _toggled,
    "toggled_optimizer": _toggled,
    "clip_gradients": lambda module: module.clip_gradients(module.optimizers(), 0.5, "norm"),
    "backward": lambda module: overrides(module, "backward"),
    "configure_gradient_clipping": lambda module: module.configure_gradient_clipping(module.optimizers(), 0.5, "norm"),
    "lr_scheduler_step": lambda module: overrides(module, "lr_scheduler_step"),
    "optimizer_step": lambda module: overrides(module, "optimizer_step"),
    "optimizer_zero_grad": lambda module: overrides(module, "optimizer_zero_grad"),
    "freeze": lambda module: [parameter.requires_grad for parameter in Plain().freeze().parameters()],
    "unfreeze": lambda module: [parameter.requires_grad for parameter in Plain().freeze().unfreeze().parameters()],
    "print": lambda module: module.print("a word"),
    "all_gather": lambda module: module.all_gather(torch.ones(2)).sum().item(),
    "trainer": lambda module: module.trainer.global_step,
    "current_epoch": lambda module: module.current_epoch,
    "global_step": lambda module: module.global_step,
    "global_rank": lambda module: module.global_rank,
    "local_rank": lambda module: module.local_rank,
    "logger": lambda module: module.logger is not None,
    "loggers": lambda module: len(module.loggers),
    "on_gpu": lambda module: module.on_gpu,
    "automatic_optimization": lambda module: module.automatic_optimization,
    "strict_loading": lambda module: module.strict_loading,
    "example_input_array": lambda module: module.example_input_array.shape,
    "to_torchscript": lambda module: type(Plain().to_torchscript()).__name__,
    "save_hyperparameters": lambda module: dict(module.hparams),
    "hparams": lambda module: module.hparams.width,
    "fabric": lambda module: module.fabric,
    "device_mesh": lambda module: module.device_mesh,
    "load_from_checkpoint": lambda module: _called(module.load_from_checkpoint),
    "to_onnx": lambda module: _called(module.to_onnx),
    "to_tensorrt": lambda module: _called(module.to_tensorrt),
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Result of every probe of a module, and every attribute of the trainer, in the middle of training, by engine."""
    by_engine: dict[str, dict[str, Any]] = {}

    class Probed(ByEpoch, Evaluated):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.example_input_array = torch.ones(1, 8)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 13:
                values.update({f"module.{name}": _try(probe, self) for name, probe in PROBES.items()})
                for row in table.ATTRIBUTES:
                    values[f"trainer.{row.name}"] = _read(self.trainer, row.name)

    for engine in ("lightning", "footplate"):
        values = by_engine[engine] = {}
        trainer = trainer_of(engine, Record(), tmp_path_factory.mktemp(engine), max_epochs=2)
        torch.manual_seed(0)
        with quiet():
            trainer.fit(Probed(), *loaders())
    return by_engine


def _try(probe: Any, module: Any) -> Any:
    try:
        return probe(module)
    except Exception as error:
        return error


def _read(trainer: Any, name: str) -> Any:
    try:
        value = getattr(trainer, name)
    except AttributeError as error:
        return error
    if name == "state":
        return value.fn, value.stage
    return dict(value) if isinstance(value, dict) else value


@pytest.mark.parametrize("row", table.MODULE, ids=ids)
def test_module_gives_what_it_gives_under_lightning(row: Row, probed: dict[str, dict[str, Any]]) -> None:
    name = f"module.{row.name}"

    assert probed["footplate"][name] == probed["lightning"][name]


@pytest.mark.parametrize("row", named(table.ATTRIBUTES, "supported", "different"), ids=ids)
def test_attribute_of_the_trainer_is_there(row: Row, probed: dict[str, dict[str, Any]]) -> None:
    ours, theirs = (probed[engine][f"trainer.{row.name}"] for engine in ("footplate", "lightning"))
    plain = (bool, int, float, str, type(None))

    if row.name == "predict_loop":
        assert isinstance(ours, AttributeError)
        return
    assert not isinstance(ours, AttributeError)
    if row.status == "supported" and isinstance(theirs, (*plain, tuple)) and row.name != "default_root_dir":
        assert ours == theirs
    if row.status == "supported" and isinstance(theirs, list):
        assert len(ours) == len(theirs)
        assert ours == theirs or not all(isinstance(item, plain) for item in theirs)


@pytest.mark.parametrize("row", named(table.ATTRIBUTES, "refused"), ids=ids)
def test_attribute_of_the_trainer_is_refused(row: Row, probed: dict[str, dict[str, Any]]) -> None:
    error = probed["footplate"][f"trainer.{row.name}"]

    assert isinstance(error, fp.ConfigError)
    assert str(error) == f"trainer.{row.name} is internal to Lightning and not available here: {row.note}."


def test_callback_metrics_are_lightnings(probed: dict[str, dict[str, Any]]) -> None:
    ours, theirs = (probed[engine]["trainer.callback_metrics"] for engine in ("footplate", "lightning"))

    assert {name: float(value) for name, value in ours.items() if "probe" not in name} == pytest.approx(
        {name: float(value) for name, value in theirs.items() if "probe" not in name}, rel=1e-6
    )


def test_stage_is_told_in_lightnings_words(make_trainer: Any) -> None:
    seen: list[tuple[str, str, bool, bool]] = []

    class Looks(Evaluated):
        def note(self, where: str) -> None:
            runner = self.trainer
            seen.append((where, str(runner.state.stage.value), runner.training, runner.validating))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("training")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("validation")

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("test")

    runner = make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1, limit_test_batches=1)
    module = Looks()
    runner.fit(module, *loaders())
    runner.test(module, loaders()[1], verbose=False)

    assert seen == [
        ("validation", "sanity_check", False, False),
        ("training", "train", True, False),
        ("validation", "validate", False, True),
        ("test", "test", False, False),
    ]


# Arguments of the trainer

VALUES: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "precision": "bf16-mixed",
    "callbacks": [pl.callbacks.LambdaCallback()],
    "max_epochs": 1,
    "min_epochs": 1,
    "max_steps": 3,
    "min_steps": 2,
    "max_time": {"minutes": 1},
    "fast_dev_run": 2,
    "limit_train_batches": 2,
    "limit_val_batches": 0.5,
    "limit_test_batches": 1,
    "limit_predict_batches": 1,
    "check_val_every_n_epoch": 2,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": True,
    "enable_progress_bar": True,
    "enable_model_summary": True,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "value",
    "deterministic": False,
    "benchmark": False,
    "strategy": "ddp",
    "sync_batchnorm": True,
    "use_distributed_sampler": False,
    "profiler": "simple",
    "reload_dataloaders_every_n_epochs": 1,
    "inference_mode": False,
    "detect_anomaly": True,
    "overfit_batches": 2,
    "logger": False,
    "accumulate_grad_batches": 2,
    "log_every_n_steps": 2,
    "val_check_interval": timedelta(microseconds=1),
}


@pytest.mark.parametrize("row", named(table.ARGUMENTS, "supported", "different"), ids=ids)
def test_argument_is_taken(row: Row, tmp_path: Path) -> None:
    arguments = {
        "accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "logger": False, "default_root_dir": str(tmp_path),
    }  # fmt: skip
    if row.name != "default_root_dir":
        arguments[row.name] = VALUES[row.name]
    trainer = fp.Trainer(**arguments)

    trainer.fit(Plain(), *loaders())

    assert trainer.global_step > 0


@pytest.mark.parametrize("row", named(table.ARGUMENTS, "refused"), ids=ids)
def test_argument_is_refused_unless_it_says_what_holds_anyway(row: Row) -> None:
    harmless, hint = table.REFUSED_ARGUMENTS[row.name]
    fp.Trainer(max_epochs=1, accelerator="cpu", **{row.name: harmless})

    with pytest.raises(
        fp.ConfigError, match=re.escape(f"Trainer({row.name}='other') is Lightning's") + ".*" + re.escape(hint)
    ):
        fp.Trainer(max_epochs=1, accelerator="cpu", **{row.name: "other"})


def test_a_misspelt_argument_is_named_with_the_nearest() -> None:
    with pytest.raises(
        fp.ConfigError, match=r"Trainer\(max_epoch=…\): there is no such argument\. Did you mean \"max_epochs\""
    ):
        fp.Trainer(max_epoch=3)  # pyright: ignore


# Callbacks and loggers: what they do is in test_lightning_callbacks.py and test_lightning_loggers.py


REFUSED: dict[str, Any] = {
    "ThroughputMonitor": lambda: pl.callbacks.ThroughputMonitor(len),
}


@pytest.mark.parametrize("row", named(table.CALLBACKS, "refused"), ids=ids)
def test_callback_is_refused(row: Row) -> None:
    with pytest.raises(fp.ConfigError, match=re.escape(f"Lightning's {row.name} can't run here: {row.note}.")):
        fp.Trainer(max_epochs=1, accelerator="cpu", callbacks=[REFUSED[row.name]()])


SUPPORTED: dict[str, Any] = {
    "Callback": lambda: pl.Callback(),
    "Checkpoint": lambda: pl.callbacks.Checkpoint(),
    "LambdaCallback": lambda: pl.callbacks.LambdaCallback(),
    "BaseFinetuning": lambda: Unfreeze(),
    "BackboneFinetuning": lambda: pl.callbacks.BackboneFinetuning(1),
    "WeightAveraging": lambda: pl.callbacks.WeightAveraging(),
    "EMAWeightAveraging": lambda: pl.callbacks.EMAWeightAveraging(),
    "ModelPruning": lambda: pl.callbacks.ModelPruning("l1_unstructured"),
    "BasePredictionWriter": lambda: pl.callbacks.BasePredictionWriter(),
    "SpikeDetection": lambda: pl.callbacks.SpikeDetection(),
    "GradientAccumulationScheduler": lambda: pl.callbacks.GradientAccumulationScheduler({9: 2}),
    "StochasticWeightAveraging": lambda: pl.callbacks.StochasticWeightAveraging(0.1),
    "EarlyStopping": lambda: pl.callbacks.EarlyStopping("val_loss", patience=99),
    "OnExceptionCheckpoint": lambda: pl.callbacks.OnExceptionCheckpoint("nowhere"),
}


RUNNING = [row for row in named(table.CALLBACKS, "supported", "different") if not row.name.endswith("Finder")]


@pytest.mark.parametrize("row", RUNNING, ids=ids)
def test_callback_runs_as_the_users_object(row: Row, make_trainer: Any) -> None:
    callback = SUPPORTED.get(row.name, getattr(pl.callbacks, row.name))()
    runner = make_trainer(callbacks=[callback])

    runner.fit(Backbone(), *loaders())

    assert callback in runner.callbacks
    assert runner.global_step == 20


@pytest.mark.parametrize("row", table.LOGGERS, ids=ids)
def test_logger_has_the_methods_that_ours_calls(row: Row) -> None:
    kind = getattr(pl.loggers, row.name)

    for name in ("log_hyperparams", "log_metrics", "log_graph", "save", "finalize"):
        assert callable(getattr(kind, name, None)), name
