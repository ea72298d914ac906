"""What a trainer makes by itself: a directory, a file of metrics, checkpoints, a progress bar and a summary."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.small import Classifier, loader

import footplate as fp


def test_without_a_word_metrics_go_to_a_csv_file(make_trainer):
    trainer = make_trainer(logger=None, log_every_n_steps=4)
    trainer.fit(Classifier(), loader())
    header, *rows = (trainer.run_dir / "metrics.csv").read_text().splitlines()
    assert header.startswith("step,epoch,train_loss_step")
    assert [int(row.split(",")[0]) for row in rows] == [4, 8, 12, 12, 16, 20, 24, 24]


def test_without_a_word_a_run_has_a_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    trainer = fp.Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False, logger=False)
    trainer.fit(Classifier(), loader())
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


def test_trainers_that_are_made_within_a_second_have_directories_of_their_own(make_trainer):
    assert len({make_trainer(default_root_dir=None).run_dir for _ in range(10)}) == 10


def test_a_directory_given_as_text_is_a_path(make_trainer, tmp_path):
    assert make_trainer(default_root_dir=str(tmp_path / "x")).run_dir == Path(tmp_path / "x")


def test_enable_checkpointing_false_saves_nothing(fit):
    made, _ = fit(enable_checkpointing=False)
    assert not list(made.run_dir.rglob("*.ckpt"))
    with pytest.raises(fp.ConfigError, match="enable_checkpointing=False, but"):
        fit(enable_checkpointing=False, callbacks=[fp.ModelCheckpoint()])


def test_the_bar_and_the_summary_come_by_themselves_and_can_be_left_out(make_trainer, capsys):
    trainer = make_trainer(enable_progress_bar=True, enable_model_summary=True, max_epochs=1)
    trainer.fit(Classifier(), loader())
    said = capsys.readouterr().err
    assert "195 parameters" in said
    assert "epoch 1/1" in said
    make_trainer(max_epochs=1).fit(Classifier(), loader())
    assert capsys.readouterr().err == ""
