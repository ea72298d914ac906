"""`footplate fit | validate | test | predict` from flags and configuration files."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import template
import yaml

import footplate as fp

REPOSITORY = Path(__file__).parents[2]


def config_of(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_flags_train_a_model_and_the_run_holds_its_configuration(footplate, net, tmp_path):
    result = footplate("fit", *net, "--model.lr", "0.5", "--seed_everything", "7")
    assert result.code == 0, result.err
    assert result.out == f"Run directory: {tmp_path / 'run'}\n"
    config = config_of(tmp_path / "run")
    assert config["model"] == {"class_path": "flowers.Net", "init_args": {"lr": 0.5, "bias": True}}
    assert config["data"]["init_args"]["train"] == "rows.parquet"
    assert config["seed_everything"] == 7
    assert config["trainer"]["default_root_dir"] == str(tmp_path / "run")


def losses(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_saved_configuration_repeats_the_run_to_the_last_digit(footplate, net, tmp_path):
    assert footplate("fit", *net).code == 0
    assert isinstance(config_of(tmp_path / "run")["seed_everything"], int)
    again = ["--config", tmp_path / "run" / "config.yaml", f"--trainer.default_root_dir={tmp_path / 'again'}"]
    assert footplate("fit", *again).code == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "run") != []


def test_flags_win_over_the_file(footplate, net, tmp_path):
    (tmp_path / "c.yaml").write_text("trainer:\n  max_epochs: 5\n  log_every_n_steps: 2\n")
    result = footplate("fit", "--config", tmp_path / "c.yaml", *net)
    assert result.code == 0, result.err
    trainer = config_of(tmp_path / "run")["trainer"]
    assert (trainer["max_epochs"], trainer["log_every_n_steps"]) == (1, 2)


def test_print_config_can_be_fed_back(footplate, net, tmp_path):
    callbacks = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
    printed = footplate("fit", *net, *callbacks, "--print_config")
    assert printed.code == 0
    (tmp_path / "c.yaml").write_text(printed.out)
    assert footplate("fit", "--config", tmp_path / "c.yaml", "--print_config").out == printed.out
    assert footplate("fit", "--config", tmp_path / "c.yaml").code == 0


def test_callbacks_and_loggers_are_known_by_their_short_names(footplate, net, tmp_path):
    result = footplate(
        "fit", *net,
        "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss", "--trainer.callbacks.patience=9",
        "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val_loss",
        "--trainer.logger=CSV",
    )  # fmt: skip
    assert result.code == 0, result.err
    trainer = config_of(tmp_path / "run")["trainer"]
    assert [callback["class_path"] for callback in trainer["callbacks"]] == [
        "footplate.EarlyStopping",
        "footplate.ModelCheckpoint",
    ]
    assert trainer["callbacks"][0]["init_args"]["patience"] == 9
    assert trainer["logger"]["class_path"] == "footplate.CSV"
    assert (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()


def test_a_file_may_list_callbacks_and_loggers_by_name(footplate, net, tmp_path):
    (tmp_path / "c.yaml").write_text("trainer: {logger: [CSV, TensorBoard], callbacks: [LearningRateMonitor]}\n")
    result = footplate("fit", *net, "--config", tmp_path / "c.yaml")
    assert result.code == 0, result.err
    assert (tmp_path / "run" / "metrics.csv").exists()
    assert (tmp_path / "run" / "tensorboard").exists()


def test_an_alert_names_its_rule_and_its_channel(footplate, net, tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(
        "trainer:\n"
        "  callbacks:\n"
        "  - class_path: Alert\n"
        "    init_args:\n"
        "      rule: [loss is NaN, no step for 5 min]\n"
        "      to: {class_path: footplate.Webhook, init_args: {url: $HOOK_URL, form: slack}}\n"
    )
    monkeypatch.setenv("HOOK_URL", "https://hooks.example/s3cr3t")
    result = footplate("fit", *net, "--config", tmp_path / "c.yaml")
    assert result.code == 0, result.err
    (callback,) = config_of(tmp_path / "run")["trainer"]["callbacks"]
    assert callback["init_args"]["to"]["init_args"]["url"] == "$HOOK_URL"
    assert "s3cr3t" not in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("kind", ["CSV", "JSONLines", "Console", "TensorBoard", "MLflow", "WandB", "Trackio"])
def test_a_new_process_knows_loggers_by_their_short_names(kind, project, net):
    """No module has imported the class before the command needs it."""
    command = [sys.executable, "-m", "footplate", "fit", *net, f"--trainer.logger={kind}", "--print_config"]
    process = template.Popen(
        command, packages=("torch",), cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"class_path: footplate.{kind}" in out


def test_a_table_may_be_given_with_its_own_arguments(footplate, tmp_path):
    (tmp_path / "c.yaml").write_text(
        "model: flowers.Net\n"
        "data:\n"
        "  class_path: TableDataModule\n"
        "  init_args:\n"
        "    train:\n"
        "      class_path: footplate.Table\n"
        "      init_args: {source: rows.parquet, filter: [[y, '=', 1]]}\n"
        f"trainer: {{max_epochs: 1, default_root_dir: {tmp_path / 'run'}, enable_progress_bar: false}}\n"
    )
    result = footplate("fit", "--config", tmp_path / "c.yaml")
    assert result.code == 0, result.err


def test_a_run_is_continued_from_its_last_checkpoint(footplate, net, tmp_path):
    assert footplate("fit", *net).code == 0
    result = footplate(
        "fit", "--config", tmp_path / "run" / "config.yaml", "--ckpt_path=last", "--trainer.max_epochs=2"
    )
    assert result.code == 0, result.err
    assert "Continuing from" in result.err
    assert [row["epoch"] for row in losses(tmp_path / "run")] == ["0", "1"]


def test_an_option_may_have_dashes_or_underscores(footplate, net, tmp_path):
    result = footplate("fit", *net, "--trainer.max-epochs=1", "--trainer.log-every-n-steps", "1", "--ckpt-path=last")
    assert result.code == 0, result.err
    assert {row["epoch"] for row in losses(tmp_path / "run")} == {"0"}

    assert 'max-restarts="x": expected an integer.' in footplate("run", "--max_restarts=x", "train.py").err
    assert 'Did you mean "--max-restarts"?' in footplate("run", "--max_restart=3", "train.py").err


def test_a_trained_model_is_validated_tested_and_predicts_a_table(footplate, net, tmp_path):
    assert footplate("fit", *net).code == 0
    config = ["--config", tmp_path / "run" / "config.yaml", "--ckpt_path=last"]

    validated = footplate("validate", *config)
    assert re.search(r"validate: val_loss 0\.\d+", validated.err), validated.err
    tested = footplate("test", *config, "--data.test=rows.parquet")
    assert re.search(r"test: test_loss 0\.\d+", tested.err), tested.err

    output = tmp_path / "predictions"
    predicted = footplate("predict", *config, "--data.predict=rows.parquet", "--output", output)
    assert predicted.code == 0, predicted.err
    assert predicted.out == f"Predictions: {output} (64 rows)\n"
    assert fp.Table(output).columns == ["y", "guess"]


def test_results_are_shown_without_a_progress_bar_too(forked, net):
    running = forked("validate", *net, "--trainer.enable_progress_bar=false")
    _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert re.search(r"^validate: val_loss \d\.\d+", err, re.M), err


def test_evaluation_without_a_checkpoint_says_that_the_weights_are_untrained(footplate, net):
    result = footplate("validate", *net)
    assert result.code == 0
    assert "No --ckpt_path was given" in result.err


def test_lightnings_modules_data_modules_and_callbacks_are_taken_by_their_path(footplate, tmp_path):
    result = footplate(
        "fit",
        "--model=lit.LitNet", "--model.lr=0.2", "--data=lit.LitData", "--data.rows=12",
        "--trainer.callbacks+=lit.Told", "--trainer.callbacks.text=steps:",
        "--trainer.max_epochs=1", f"--trainer.default_root_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "steps: 3" in result.out


def test_a_run_of_footplates_own_classes_never_imports_lightning(project, net):
    script = (
        "import sys; from footplate.cli.main import main; sys.exit(main(sys.argv[1:]) or 'lightning' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", script, "fit", *net], cwd=project, capture_output=True, check=False)
    assert process.returncode == 0, process.stderr


def test_help_of_a_class_shows_its_arguments(footplate):
    result = footplate("fit", "--trainer.callbacks.help=EarlyStopping")
    assert result.code == 0
    assert "--trainer.callbacks.stopping_threshold" in result.out


def test_the_example_configuration_trains(footplate, monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    quick = [
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.limit_train_batches=2",
        "--trainer.limit_val_batches=2",
    ]
    result = footplate("fit", "--config", "examples/run.yaml", *quick)
    assert result.code == 0, result.err


def test_a_dry_run_leaves_nothing_behind(footplate, net, tmp_path):
    assert footplate("fit", *net, "--trainer.fast_dev_run=true").code == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "raised"),
    [
        ("flowers.Refusing", ValueError),
        ("broken.Net", ZeroDivisionError),
        ("lacking.Net", ModuleNotFoundError),
        ("half.Net", SyntaxError),
    ],
)
def test_what_the_users_code_raises_comes_out_as_itself(footplate, net, model, raised):
    with pytest.raises(raised) as caught:
        footplate("fit", *net, f"--model={model}")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
