"""Support of Lightning's features in Footplate, as data. It generates pages of docs/reference. A test checks each row.

    supported    it works as in Lightning
    different    it works, with the difference in the note
    refused      one clear error, which names the alternative

After a change, `make tables` writes the tables into lightning.md and lightning-trainer.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from footplate.compat.lightning.adapter import REFUSED_ARGUMENTS, REFUSED_ATTRIBUTES, REFUSED_HOOKS
from footplate.compat.lightning.callbacks import REFUSED_CALLBACKS

_REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
# The pages with the tables. Each table is on one of them.
DOCS = (_REFERENCE / "lightning.md", _REFERENCE / "lightning-trainer.md")


@dataclass(frozen=True)
class Row:
    """One feature of Lightning.

    Attributes:
        name: Lightning's name of it.
        status: "supported", "different" or "refused".
        note: the replacement, the difference, or the alternative.
    """

    name: str
    status: str = "supported"
    note: str = ""


def _supported(names: str) -> tuple[Row, ...]:
    return tuple(Row(name) for name in names.split())


def _refused(reasons: dict[str, str]) -> tuple[Row, ...]:
    return tuple(Row(name, "refused", hint) for name, hint in reasons.items())


_ORDER = "an epoch's schedulers step after it: it sees the rate of the epoch that ends"

HOOKS = (
    *_supported(
        "prepare_data setup teardown configure_model configure_callbacks configure_optimizers train_dataloader "
        "val_dataloader test_dataloader predict_dataloader on_fit_start on_fit_end on_train_start on_train_end "
        "on_train_epoch_start on_train_batch_start on_train_batch_end on_validation_start on_validation_end "
        "on_validation_epoch_start on_validation_epoch_end on_validation_batch_start on_validation_batch_end "
        "on_validation_model_eval on_validation_model_train on_test_start on_test_end on_test_epoch_start "
        "on_test_epoch_end on_test_batch_start on_test_batch_end on_test_model_eval on_test_model_train "
        "on_predict_start on_predict_end on_predict_epoch_start on_predict_epoch_end on_predict_batch_start "
        "on_predict_batch_end on_predict_model_eval on_before_zero_grad on_before_backward on_after_backward "
        "on_before_optimizer_step on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer "
        "on_load_checkpoint"
    ),
    Row("on_train_epoch_end", "different", _ORDER),
    Row("on_save_checkpoint", "different", "what it adds must be plain values and tensors: loading never runs code"),
    *_refused(REFUSED_HOOKS),
)

MODULE = (
    *_supported(
        "forward test_step predict_step log_dict optimizers lr_schedulers manual_backward toggle_optimizer "
        "untoggle_optimizer toggled_optimizer clip_gradients backward configure_gradient_clipping lr_scheduler_step "
        "optimizer_step optimizer_zero_grad freeze unfreeze print all_gather trainer current_epoch global_step "
        "global_rank local_rank loggers on_gpu automatic_optimization strict_loading example_input_array "
        "to_torchscript save_hyperparameters hparams"
    ),
    Row("training_step", "different", "a window whose batches were all skipped (`None`) is no step: nothing is counted, "
        "no hook of the optimizer is called, no scheduler steps; `dataloader_iter` as an argument is refused"),
    Row("validation_step", "different", "values logged with `on_step=True` aren't reported batch by batch, only reduced"),
    Row("log", "different", "an epoch's mean is kept in float64 (Lightning: float32), so its last digits differ; a module "
        "inside the module may log too; with several ranks, it is always that of all of them, and `sync_dist` matters to "
        "values of a step alone"),
    Row("logger", "different", "on every rank but the first, a silent one that takes every call"),
    Row("load_from_checkpoint", "different", "Lightning's own, for Lightning's `.ckpt` files. For a Footplate checkpoint "
        "use `footplate.compat.lightning.load_from_checkpoint(YourModule, path)`, or give it the torch file that "
        "`footplate checkpoint convert` makes"),
    Row("fabric", "different", "always None"),
    Row("device_mesh", "different", "None, but with a `ModelParallelStrategy`"),
    Row("to_onnx", "different", "Lightning's own; it needs the `onnx` packages. `footplate.export_model` writes `.pt2`"),
    Row("to_tensorrt", "different", "Lightning's own; it needs `torch_tensorrt`"),
)  # fmt: skip

DATAMODULE = (
    *_supported(
        "prepare_data setup teardown train_dataloader val_dataloader test_dataloader predict_dataloader "
        "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer state_dict load_state_dict "
        "on_exception from_datasets"
    ),
)

ARGUMENTS = (
    *_supported(
        "accelerator devices precision callbacks fast_dev_run max_epochs min_epochs max_steps min_steps max_time "
        "limit_train_batches limit_val_batches limit_test_batches limit_predict_batches check_val_every_n_epoch "
        "num_sanity_val_steps enable_checkpointing enable_progress_bar enable_model_summary "
        "gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode detect_anomaly overfit_batches "
        "sync_batchnorm use_distributed_sampler val_check_interval"
    ),
    Row("num_nodes", "different", "makes its calls on the cluster (Ray, Spark) that the process is connected to; processes "
        "that were started already must be `num_nodes` × `devices`"),
    Row("strategy", "different", "by name: \"auto\", \"ddp\", \"ddp_find_unused_parameters_true\", \"fsdp\" (which is "
        "FSDP2), and \"replicas\", in the place of the \"dp\" that Lightning had; `DDPStrategy`, with no "
        "option but `find_unused_parameters`, stands for its name; `FSDPStrategy` for [ours](../guide/sharding.md) with "
        "its types of layers, sharding and mesh; `ModelParallelStrategy` for [ours](../guide/tensor-parallel.md) with its "
        "sizes; other objects and names are refused"),
    Row("logger", "different", "`True` is a CSV file, not TensorBoard. Rows are numbered by optimizer steps taken, from 1 "
        "(Lightning: by batches, from 0)"),
    Row("accumulate_grad_batches", "different", "a step may return a sum of losses with its weight, for a [mean over "
        "tokens](../guide/training.md#means-over-tokens); with a loader of unknown length, the last, partial window is "
        "stepped after the last `on_train_batch_end`; manual optimisation refuses it, as in Lightning"),
    Row("log_every_n_steps", "different", "counts optimizer steps, also in manual optimisation (Lightning: batches there)"),
    Row("reload_dataloaders_every_n_epochs", "different", "validation loaders are made with the training loaders, at the "
        "beginning of every so many-th epoch (Lightning: at the next validation)"),
    Row("profiler", "different", "Lightning's profilers, by name or as objects, and \"torch\" and `footplate.Profiler` for "
        "[a range of steps](../guide/profiling.md). Hooks that nobody overrides are not "
        "recorded, nor is a data module's `state_dict`. The strategy's name is ours"),
    Row("default_root_dir", "different", "is the run's own directory; by default a new one under `runs/`"),
    *(Row(name, "refused", hint) for name, (_, hint) in REFUSED_ARGUMENTS.items()),
)  # fmt: skip

ATTRIBUTES = (
    *_supported(
        "lightning_module model optimizers lr_scheduler_configs is_global_zero global_rank local_rank node_rank "
        "world_size num_nodes num_devices device_ids enable_validation early_stopping_callback early_stopping_callbacks "
        "checkpoint_callback checkpoint_callbacks progress_bar_callback interrupted received_sigterm training validating "
        "testing predicting evaluating sanity_checking state global_step max_epochs max_steps "
        "min_steps num_training_batches num_val_batches num_sanity_val_batches num_test_batches "
        "num_predict_batches loggers callbacks "
        "estimated_stepping_batches should_stop fast_dev_run accumulate_grad_batches gradient_clip_val log_every_n_steps "
        "check_val_every_n_epoch limit_train_batches limit_val_batches limit_test_batches limit_predict_batches "
        "overfit_batches num_sanity_val_steps datamodule barebones train_dataloader val_dataloaders test_dataloaders "
        "predict_dataloaders ckpt_path fit validate test predict save_checkpoint print default_root_dir"
    ),
    Row("accelerator", "different", "a `footplate.Accelerator`: `name`, `stats(device)`"),
    Row("strategy", "different", "a stand-in: `root_device`, `world_size`, `reduce`, "
        "`reduce_boolean_decision`, `broadcast`, `all_gather`, `barrier`"),
    Row("_accelerator_connector", "different", "a stand-in: `is_distributed`"),
    Row("profiler", "different", "without one, an object whose `profile` records nothing"),
    Row("precision", "different", "an object; `trainer.precision.name` is \"bf16-mixed\""),
    Row("is_last_batch", "different", "always False with a loader of unknown length, since no batch is read ahead"),
    Row("min_epochs", "different", "None where Lightning has 0"),
    Row("callback_metrics", "different", "float64 tensors on the CPU; reading it brings the latest values to the host"),
    Row("logged_metrics", "different", "floats, as they were last sent to the loggers"),
    Row("progress_bar_metrics", "different", "floats, as they were last read (every `log_every_n_steps`)"),
    Row("current_epoch", "different", "after a run that was stopped inside an epoch, that epoch (Lightning: the next)"),
    Row("log_dir", "different", "with several processes or a logger of Footplate's, the run's directory"),
    Row("logger", "different", "on every rank but the first, a silent one that takes every call"),
    Row("val_check_interval", "different", "None where Lightning has 1.0"),
    Row("gradient_clip_algorithm", "different", "\"norm\" where Lightning has None"),
    *(Row(name, "refused", hint) for name, hint in REFUSED_ATTRIBUTES.items() if name != "predict_loop"),
    Row("predict_loop", "different", "only with a `BasePredictionWriter`: `predictions`, `current_batch_indices`, "
        "`epoch_batch_indices`"),
)  # fmt: skip

CALLBACKS = (
    *_supported(
        "Callback Checkpoint LambdaCallback BaseFinetuning BackboneFinetuning WeightAveraging EMAWeightAveraging "
        "ModelPruning BasePredictionWriter SpikeDetection EarlyStopping Timer ModelSummary RichModelSummary ProgressBar "
        "TQDMProgressBar RichProgressBar GradientAccumulationScheduler"
    ),
    Row("BatchSizeFinder", "different", "footplate.Tuner searches before the call begins, with its arguments"),
    Row("LearningRateFinder", "different", "footplate.Tuner searches before `fit` begins, with its arguments. It isn't "
        "in `trainer.callbacks` during `fit`. A subclass that searches in later epochs is refused"),
    Row("ModelCheckpoint", "different", "saves as footplate.ModelCheckpoint does: a checkpoint is a directory, "
        "`last.ckpt` a link. A subclass may override hooks, `CHECKPOINT_NAME_LAST` and the state; one that overrides "
        "another method, or `FILE_EXTENSION`, is refused"),
    Row("OnExceptionCheckpoint", "different", "what it has saved stays when the trainer is torn down after an exception; "
        "an exception in a backward pass or an optimizer's step leaves nothing that could be continued, and is not saved"),
    Row("LearningRateMonitor", "different", "its values are in the row of the step or epoch that used them; a trainer "
        "without a logger is no error"),
    Row("DeviceStatsMonitor", "different", "its figures are in the row of a step that is reported, and in "
        "`trainer.callback_metrics`"),
    Row("StochasticWeightAveraging", "different", "batch norm's statistics are gathered when training has ended, without "
        "hooks and logging. Lightning does so in one more epoch, and steps the optimizer at its end with old gradients, so "
        "that its weights are not the average"),
    *_refused(REFUSED_CALLBACKS),
)  # fmt: skip

LOGGERS = (
    *_supported("Logger CSVLogger"),
    Row("TensorBoardLogger", "different", "`log_graph=True` logs the graph at the end of training"),
    Row("MLFlowLogger", "different", "`log_model=` is refused: use footplate.MLflow"),
    Row("WandbLogger", "different", "`log_model=` is refused; never tried against its service"),
    Row("CometLogger", "different", "taken by its interface alone: never tried against its service"),
    Row("LitLogger", "different", "`log_model=` is refused; never tried against its service"),
)

TABLES = {
    "Hooks of a LightningModule": HOOKS,
    "Methods and attributes of a LightningModule": MODULE,
    "A LightningDataModule": DATAMODULE,
    "Arguments of the Trainer": ARGUMENTS,
    "Attributes and methods of the Trainer": ATTRIBUTES,
    "Callbacks": CALLBACKS,
    "Loggers": LOGGERS,
}


def named(rows: tuple[Row, ...], *statuses: str) -> list[Row]:
    """The rows with the given statuses."""
    return [row for row in rows if row.status in statuses]


def ids(row: Row) -> str:
    """Test ids of rows."""
    return row.name


def render(rows: tuple[Row, ...]) -> str:
    """The supported features as one list, and all others as a table, in Markdown."""
    plain = ", ".join(f"`{row.name}`" for row in named(rows, "supported"))
    parts = [f"**Supported:** {plain}."] if plain else []
    others = [row for status in ("different", "refused") for row in named(rows, status)]
    if others:
        lines = [f"| `{row.name}` | {row.status} | {row.note} |" for row in others]
        parts.append("\n".join(["| otherwise | | |", "| --- | --- | --- |", *lines]))
    return "\n\n".join(parts)


def filled(text: str) -> str:
    """A page with all of its tables regenerated."""
    for name, rows in TABLES.items():
        text = with_table(text, name, f"\n{render(rows)}")
    return text


def with_table(text: str, name: str, table: str) -> str:
    """A document with a new table between `<!-- table: NAME -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match.group(1)}{table}\n\n{match.group(2)}", text)
