"""Mistakes on the command line: exit code 2, one message with the remedy, no traceback."""

from __future__ import annotations

import re

import pytest

BAD_OPTIONS = {
    "a misspelt option": (["--trainer.max_epoch=3"], 'Did you mean "--trainer.max_epochs"?'),
    "a word of its own": (["three"], '"three" follows no option'),
    "an option without its value": (["--config"], "--config: expected one argument"),
    "a wrong type": (["--trainer.max_epochs=three"], 'trainer.max_epochs="three": expected an integer or null.'),
    "a wrong type of a class's argument": (["--model.lr=fast"], 'model.lr="fast": expected a number.'),
    "a wrong type of a callback's argument": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.patience=lots"],
        'trainer.callbacks.patience="lots": expected an integer.',
    ),
    "none of the choices": (
        ["--trainer.gradient_clip_algorithm=size"],
        'trainer.gradient_clip_algorithm="size": expected "norm" or "value" or null.',
    ),
    "an argument that a class lacks": (
        ["--data.batchsize=3"],
        'data.batchsize: TableDataModule has no such argument. Did you mean "batch_size"?',
    ),
    "an argument that a class needs": (
        ["--trainer.callbacks+=EarlyStopping"],
        "EarlyStopping needs monitor. Give it with --trainer.callbacks.monitor.",
    ),
    "a misspelt callback": (["--trainer.callbacks+=EarlyStoping"], 'Did you mean "EarlyStopping"?'),
    "a misspelt logger": (["--trainer.logger=Mlflow"], 'Did you mean "MLflow"?'),
    "a misspelt class": (["--model=flowers.Nett"], 'flowers has no class "Nett". Did you mean "Net"?'),
    "a module that isn't there": (["--model=trees.Net"], 'there is no module "trees"'),
    "a class of another kind": (
        ["--model=footplate.EarlyStopping"],
        'model="footplate.EarlyStopping": expected a Module or a LightningModule.',
    ),
    "an unknown accelerator": (["--trainer.accelerator=cudda"], 'Did you mean "cuda"?'),
    "an unknown precision": (["--trainer.precision=bf16-mixd"], 'precision="bf16-mixd"'),
    "a device that isn't there": (["--trainer.devices=x"], "devices='x'"),
    "a missing table": (["--data.train=nowhere"], "nowhere: there is nothing at this path."),
    "an empty table": (["--data.train=empty.parquet"], "empty.parquet: the table has no rows"),
    "a file that is no table": (["--data.train=flowers.py"], "flowers.py: neither a Delta table"),
    "images that can't be decoded": (["--data.train=images.parquet"], "images.parquet"),
    "labels beyond the model's outputs": (["--data.train=labels.parquet"], "A label is 7"),
    "no batches": (["--data.batch_size=100", "--data.drop_last=true"], "fewer than one global batch of 100"),
    "a metric that nothing logs": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_lss"],
        'EarlyStopping monitors "val_lss", which nothing logs. Did you mean "val_loss"?',
    ),
    "a directory that can't be written to": (["--trainer.default_root_dir=flowers.py/run"], "flowers.py/run"),
    "a checkpoint that isn't there": (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
}


@pytest.mark.parametrize("mistake", BAD_OPTIONS)
def test_bad_options(footplate, net, mistake):
    argv, message = BAD_OPTIONS[mistake]
    result = footplate("fit", *net, *argv)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


BAD_FILES = {
    "a misspelt setting": (
        "trainer: {max_epoch: 3}",
        'trainer.max_epoch: there is no such setting. Did you mean "trainer.',
    ),
    "a misspelt section": ("modle: flowers.Net", 'modle: there is no such setting. Did you mean "model"?'),
    "no YAML": ("trainer: [3", "the configuration is no YAML"),
    "an argument that a callback lacks": (
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: x, patiens: 3}}]}",
        'trainer.callbacks.patiens: EarlyStopping has no such argument. Did you mean "patience"?',
    ),
    "a wrong type": ("trainer: {max_epochs: many}", 'trainer.max_epochs="many": expected an integer or null.'),
}


@pytest.mark.parametrize("mistake", BAD_FILES)
def test_bad_configuration_files(footplate, net, tmp_path, mistake):
    text, message = BAD_FILES[mistake]
    (tmp_path / "c.yaml").write_text(text)
    result = footplate("fit", *net, "--config", tmp_path / "c.yaml")
    assert result.code == 2
    assert message in result.err


def test_a_missing_configuration_file(footplate):
    result = footplate("fit", "--config=nowhere.yaml")
    assert result.code == 2
    assert re.fullmatch(r'footplate fit: there is no configuration file ".*nowhere\.yaml"\.\n', result.err)


def test_a_missing_model(footplate):
    assert (
        footplate("fit").err == "footplate fit: model: not given. Give it with --model, or in a configuration file.\n"
    )


def test_arguments_of_a_class_that_was_not_named(footplate):
    assert (
        "data.train: of which class? Name it first, with --data." in footplate("fit", "--data.train=rows.parquet").err
    )


def test_a_column_that_is_not_there(footplate, net):
    columns = "--data.train={class_path: footplate.Table, init_args: {source: rows.parquet, columns: [x, z]}}"
    result = footplate("fit", *net, columns)
    assert result.code == 2
    assert "rows.parquet: no column 'z'." in result.err


def test_a_checkpoint_of_another_model(footplate, net, tmp_path):
    assert footplate("fit", *net).code == 0
    result = footplate("validate", *net, "--model.bias=false", "--ckpt_path=last")
    assert result.code == 2
    assert "is not a checkpoint of this Net" in result.err
    assert "net.bias" in result.err


def test_no_data(footplate, tmp_path):
    result = footplate("fit", "--model=flowers.Net", "--trainer.max_epochs=1", f"--trainer.default_root_dir={tmp_path}")
    assert result.code == 2
    assert "no training data" in result.err
