"""Studies of tiny trainings, in real processes."""

from __future__ import annotations

import functools
import html
import json
import os
import struct
import tempfile

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.core.errors import ConfigError, LaunchError
from footplate.scaling import learning_rate

pytestmark = pytest.mark.slow

ROWS, BATCH, EPOCHS = 64, 8, 2


class Net(fp.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - 1).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.layer(batch[0]) - 1).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def quiet(**more):
    return fp.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir="run", **more,
    )  # fmt: skip


def fit():
    rows = TensorDataset(torch.ones(ROWS, 4))
    quiet().fit(Net(), DataLoader(rows, batch_size=BATCH), DataLoader(rows, batch_size=BATCH))


def plain():
    size = int(os.environ["WORLD_SIZE"])
    return {"val_loss": learning_rate(0.5), "samples": 100 * size, "seconds": 2.0}


def fails_in_two():
    if os.environ["WORLD_SIZE"] == "2":
        raise MemoryError("no room for two")
    return 0.25


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Run a small study that is not logged."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(fp.scale, np=[1, 2], repeat=1, experiment=None, output=tmp_path / "out")


def test_a_trainer_that_knows_nothing_of_it_is_studied(study, tmp_path):
    results = study(fit, repeat=2)

    one, two = results.sizes
    assert [(training.np, training.repeat) for training in results.trainings] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert {training.samples for training in results.trainings} == {EPOCHS * ROWS}  # of all ranks
    assert (one.steps, two.steps) == (EPOCHS * ROWS / BATCH, EPOCHS * ROWS / BATCH / 2)
    assert (one.epochs, one.lr_factor, two.lr_factor) == (EPOCHS, 1.0, 2.0)
    for size in results.sizes:
        assert 0 < size.seconds.median < size.wall_s.median
        assert sum(size.phases.values()) == pytest.approx(size.seconds.median, rel=0.3)
        assert size.loss.median > 0
    assert one.efficiency == 1.0
    assert results.reading.startswith("2 processes took")
    assert sorted(path.name for path in (tmp_path / "out" / "logs").iterdir()) == [
        "np-1-1",
        "np-1-2",
        "np-2-1",
        "np-2-2",
    ]


def test_table_json_and_chart_are_written_and_a_notebook_shows_the_table(study, tmp_path):
    results = study(plain)
    written = json.loads((tmp_path / "out/scaling.json").read_text())
    assert written["reading"] == results.reading
    assert [size["np"] for size in written["sizes"]] == [1, 2]
    assert written["setup"]["lr_rule"] == "linear"
    page = (tmp_path / "out/scaling.md").read_text()
    assert "| 1 | × 1 | 2 s |" in page
    assert results.reading in page
    picture = (tmp_path / "out/scaling.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert min(width, height) > 500
    shown = results._repr_html_()
    assert "<strong>Scaling of plain</strong>" in shown
    assert '<td style="text-align: left">× 1</td><td style="text-align: left">2 s</td>' in shown
    assert results.reading in html.unescape(shown)


def test_a_plain_function_asks_for_its_rate_and_returns_its_figures(study):
    one, two = study(plain, lr_rule="sqrt").sizes
    assert (one.loss.median, two.loss.median) == (0.5, pytest.approx(0.5 * 2**0.5))
    assert (one.samples_per_second.median, two.samples_per_second.median) == (50, 100)
    assert two.efficiency == 1.0


def test_a_size_that_fails_is_told_and_hides_no_other(study):
    results = study(fails_in_two, repeat=2)
    one, two = results.sizes
    assert (one.done, one.loss.median) == (2, 0.25)
    assert (two.done, two.failures) == (0, ("MemoryError: no room for two",))
    assert [training.np for training in results.trainings] == [1, 2, 1]  # not tried again
    assert "np=2 failed: MemoryError: no room for two." in results.reading


def test_what_a_function_does_not_tell_is_said(study):
    results = study(lambda: None, np=[1])
    assert results.sizes[0].loss is None
    assert any("Only the running time is known" in note for note in results.notes)
    assert not any("learning rate" in note for note in results.notes)


def test_a_learning_rate_that_nothing_asked_for_is_not_said_to_have_grown(study):
    assert any("Each size had the training's own learning rate" in note for note in study(lambda: 0.5, np=[1, 2]).notes)
    assert not any("learning rate" in note for note in study(lambda: 0.5, np=[1, 2], lr_rule="none").notes)
    assert not any("learning rate" in note for note in study(plain).notes)


def test_a_metric_of_another_name_is_said_with_what_was_logged(study):
    results = study(fit, np=[1], monitor="val_lss")
    assert any('"val_lss" was not logged. Did you mean "val_loss"?' in note for note in results.notes)


def test_a_training_that_diverges_is_no_failure_and_told(study):
    results = study(lambda: float("nan"), np=[1])
    assert (results.sizes[0].done, results.sizes[0].diverged) == (1, 1)
    assert "val_loss was not finite" in results.reading
    assert "NaN" not in (results.directory / "scaling.json").read_text()


def test_a_function_that_can_not_travel_is_refused_before_any_training(study):
    with tempfile.TemporaryFile() as file, pytest.raises(LaunchError, match="file"):
        study(lambda: file.name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"np": [0]}, "np=0"),
        ({"np": []}, r"np=\[\]"),
        ({"np": [1.5]}, r"np=1\.5"),
        ({"repeat": 0}, "repeat=0"),
        ({"backend": "slurm"}, 'backend="slurm"'),
        ({"lr_rule": "cubic"}, "lr_rule='cubic'"),
    ],
)
def test_what_can_not_be_is_refused_before_any_training(study, arguments, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        study(plain, **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.engine
def test_a_study_is_a_run_of_mlflow_with_its_trainings_beneath_it(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    results = fp.scale(fails_in_two, [1, 2], repeat=1, output=tmp_path / "runs/study", experiment="sizes")

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs/mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("sizes").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.info.run_name: run for run in runs if run is not parent}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    assert {name: run.info.status for name, run in children.items()} == {"np-1-1": "FINISHED", "np-2-1": "FAILED"}
    assert "no room for two" in children["np-2-1"].data.tags["failure"]
    assert children["np-1-1"].data.metrics["val_loss"] == 0.25
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["mlflow.note.content"].startswith(results.reading)
    assert parent.data.params["lr_rule"] == "linear"
    (point,) = client.get_metric_history(parent.info.run_id, "efficiency")
    assert (point.step, point.value) == (1, 1.0)
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} >= {
        "scaling.json", "scaling.md", "scaling.png",
    }  # fmt: skip
