"""`fp.report`, `footplate report` and `fp.Report()`: files, mistakes, and runs that end in every way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs.conftest import Bench
from jobs.conftest import bench as bench
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.cli.main import main
from footplate.core.errors import ConfigError, MissingExtra
from footplate.jobs.states import State
from footplate.reporting.charts import column_chart
from footplate.reporting.comparison import distinct_names
from footplate.reporting.goodput import LedgerRow, RunLedger, goodput_section, goodputs_section, ledger_of
from footplate.reporting.html import Html, escaped, tag
from footplate.reporting.run_record import RunRecord, read_run
from footplate.reporting.sections_training import training_minutes, without_stage
from footplate.reporting.table_statistics import Column
from reporting.runs import full_run, monitor_rows, write_hparams, write_metrics, write_monitor


class Net(fp.Module):
    """A model that fails at a step, if the test wants it."""

    def __init__(self, fails_with: BaseException | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="fails_with")
        self.layer = torch.nn.Linear(1, 1)
        self.fails_with = fails_with

    def training_step(self, batch, batch_idx):
        if self.fails_with is not None and self.global_step == 5:
            raise self.fails_with
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data():
    return DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=1)


def page_of(directory) -> str:
    return (Path(directory) / "report.html").read_text()


def test_a_report_is_one_file_beside_the_run(tmp_path):
    write_metrics(tmp_path / "run")
    path = fp.report(tmp_path / "run")
    assert path == tmp_path / "run/report.html"
    assert "plotly.js v" in path.read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == ["metrics.csv", "report.html"]


def test_without_data_no_table_is_read(tmp_path):
    run = full_run(tmp_path / "run")
    text = fp.report(run, output=tmp_path / "r.html", data=False).read_text()
    assert 'id="data"' not in text
    assert "no picture" in text
    assert "48 of 60 predictions are right" in text


@pytest.mark.parametrize(
    ("runs", "output", "message"),
    [
        ([], None, "expected the directory of a run"),
        (["empty"], None, "this directory holds no run"),
        (["nowhere"], None, "there is no such directory"),
        (["run", "run"], None, "give the file to write"),
        (["run"], "nowhere/r.html", "can't be written: No such file or directory"),
        (["run"], "empty", "can't be written: Is a directory"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, runs, output, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_metrics(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        fp.report(*runs, output=output)
    assert list(tmp_path.glob("*.tmp")) == []


def test_without_plotly_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    write_metrics(tmp_path)
    with pytest.raises(MissingExtra, match=r'A report needs plotly\.offline.*pip install "footplate\[report\]"'):
        fp.report(tmp_path)


def test_the_command_writes_a_report_and_prints_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "a")
    write_metrics(tmp_path / "b")
    assert main(["report", "a"]) == 0
    assert capsys.readouterr().out == "a/report.html\n"
    assert main(["report", "a", "b", "--output", "both.html", "--no-data"]) == 0
    assert "2 runs: a, b" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "run: not given"),
        (["a", "b"], "--output: not given. A report of several runs needs a file"),
        (["a", "--output", "no/r.html"], "--output=no/r.html: its directory doesn't exist."),
        (["a", "--output", "."], "--output=.: this is a directory."),
        (["a", "--outptu", "x"], 'Did you mean "--output"?'),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_callback_writes_a_report_and_records_the_environment(make_trainer):
    run = make_trainer(max_epochs=1, callbacks=[fp.Report()], log_every_n_steps=1, logger=fp.CSV())
    run.fit(Net(), data())
    page = page_of(run.default_root_dir)
    assert 'class="badge finished"' in page
    assert "train_loss" in page
    environment = json.loads((Path(run.default_root_dir) / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["devices"] == ["cpu:0"]
    assert environment["command"]
    assert "<dt>complete epochs</dt><dd>1</dd>" in page


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(143), "interrupted")],
)
def test_the_callback_writes_a_report_of_a_run_that_does_not_finish(make_trainer, error, status):
    run = make_trainer(max_epochs=1, callbacks=[fp.Report()], log_every_n_steps=1, logger=fp.CSV())
    with pytest.raises(type(error)):
        run.fit(Net(error), data())
    page = page_of(run.default_root_dir)
    assert f'class="badge {status}"' in page
    assert "train_loss" in page


def test_a_report_that_cannot_be_written_is_a_warning(make_trainer, caplog):
    run = make_trainer(max_epochs=1, callbacks=[fp.Report()], logger=fp.CSV())
    (Path(run.default_root_dir) / "report.html").mkdir(parents=True)
    run.fit(Net(), data())
    assert run.global_step == 8
    assert "The report of this run can't be written" in caplog.text


def test_the_callback_needs_plotly_before_training(make_trainer, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    run = make_trainer(max_epochs=1, callbacks=[fp.Report()])
    with pytest.raises(MissingExtra):
        run.fit(Net(), data())
    assert run.global_step == 0


def test_a_replay_writes_no_report(make_trainer, caplog):
    class Replaying(fp.Callback):
        saves_nothing = True

    run = make_trainer(max_epochs=1, callbacks=[fp.Report(), Replaying()])
    run.fit(Net(), data())
    assert not Path(run.default_root_dir, "environment.json").exists()
    assert "report" not in caplog.text


def test_a_dry_run_writes_no_report(make_trainer):
    run = make_trainer(fast_dev_run=True, callbacks=[fp.Report()])
    run.fit(Net(), data())
    assert not (Path(run.default_root_dir) / "report.html").exists()


def test_a_run_of_the_command_line_is_repeated_from_its_configuration(tmp_path):
    write_metrics(tmp_path / "my run")
    (tmp_path / "my run/config.yaml").write_text("model: null\n")
    page = fp.report(tmp_path / "my run").read_text()
    config = f"&#x27;{tmp_path}/my run/config.yaml&#x27;"
    assert f"footplate fit --config {config} --trainer.default_root_dir &#x27;{tmp_path}/my run-again&#x27;" in page
    assert f"footplate fit --config {config} --ckpt_path last" in page


def test_a_plan_is_compared_with_what_was_measured(tmp_path):
    run = full_run(tmp_path / "run")
    write_monitor(run, monitor_rows())  # one rank, as one of the plan's choices has
    page = fp.report(run).read_text()
    assert "The run reached 25% of the samples per second that cpu allows at most." in page


def test_a_ledger_is_a_table_with_its_sum():
    rows = (LedgerRow("training", 75.0, 3.0), LedgerRow("waiting <b>", 25.0))
    section = goodput_section(RunLedger(rows, machine="1 n1-standard-4"))
    assert '<th scope="row">training</th><td>1 min 15 s</td><td>75.0%</td><td>$3.00</td>' in section
    assert '<th scope="row">sum</th><td>1 min 40 s</td><td>100.0%</td><td>$3.00</td>' in section
    assert "waiting &lt;b&gt;" in section
    assert "<b>" not in section
    assert "Price: 1 n1-standard-4." in section


@pytest.mark.engine
def test_the_ledger_of_a_run_in_a_job_is_that_of_the_job_with_its_price(bench: Bench):
    bench.program("time.sleep(0.5)")
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    job, run = bench.jobs.store.find("my_job"), bench.directory / "out"
    (process,) = bench.jobs.store.processes("my_job")
    rows = [{**row, "time": process.began, "setup_s": 0.0} for row in monitor_rows(0, status=None)]
    write_monitor(run, [{**rows[0], "job": job.id}])

    ledger = ledger_of(read_run(run))
    assert ledger.of == "of the job my_job, from its submission"
    assert ledger.seconds == pytest.approx(job.ended - job.created, abs=0.1)
    assert ledger.money is not None
    page = fp.report(run).read_text()
    assert "Every second of the job my_job, from its submission, by its cause." in page
    assert "Price: if it ran on 1 n1-standard-4, by the list price in us-central1." in page

    # A later job of the same name is another one.
    write_monitor(run, [{**rows[0], "job": f"{job.id}0"}])
    assert ledger_of(read_run(run)).of == "of the run"


def test_ledgers_of_several_runs_stand_side_by_side():
    first = RunLedger((LedgerRow("training", 75.0, 3.0), LedgerRow("waiting", 25.0, 1.0)), goodput=0.75)
    second = RunLedger((LedgerRow("training", 30.0),), goodput=1.0)
    section = goodputs_section([("one", first), ("two", second), ("without a record", RunLedger())])
    assert '<th scope="row">training</th><td>1 min 15 s (75.0%)</td><td>30.0 s (100.0%)</td>' in section
    assert '<th scope="row">waiting</th><td>25.0 s (25.0%)</td><td>–</td>' in section
    assert '<th scope="row">price</th><td>$4.00</td><td>–</td>' in section
    assert '<th scope="row">goodput</th><td>75.0%</td><td>100.0%</td>' in section
    assert "There is no goodput ledger of these runs." in goodputs_section([("a", RunLedger()), ("b", RunLedger())])


def test_text_is_escaped_unless_it_is_html():
    assert tag("p", "<b>", Html("<b>x</b>"), title='"&') == '<p title="&quot;&amp;">&lt;b&gt;<b>x</b></p>'
    assert escaped("a\x00b\x1b[31m\ud800") == "a\ufffdb\ufffd[31m?"


def test_a_chart_cannot_end_its_script():
    chart = column_chart("</script>", Column("</script><!--", "string", classes=(("</script>", 2), ("b", 1))))
    assert chart is not None
    drawn = chart.draw()
    assert drawn.count("</script>") == 1
    assert "<!--" not in drawn


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train_loss", ("loss", "train")),
        ("val/acc", ("acc", "val")),
        ("validation_f1", ("f1", "val")),
        ("test_loss", ("loss", "test")),
        ("loss", ("loss", "train")),
        ("val_", ("val_", "train")),
    ],
)
def test_metrics_of_all_stages_share_a_chart(name, expected):
    assert without_stage(name) == expected


def test_runs_are_named_by_the_end_of_their_paths_that_differs():
    paths = ["x/a/run", "y/a/run", "y/b/run"]
    runs = distinct_names([RunRecord(Path(path), "run", "ended") for path in paths])
    assert [run.name for run in runs] == paths
    same = distinct_names([RunRecord(Path("x/run"), "run", "ended")] * 2)
    assert [run.name for run in same] == ["run (1)", "run (2)"]


def test_steps_that_were_made_again_have_the_time_of_the_last_attempt(tmp_path):
    import numpy as np

    from footplate.reporting.run_record import read_run

    minutes = training_minutes(read_run(full_run(tmp_path / "run")), np.array([0.0, 140.0, 200.0, 400.0]))
    assert minutes is not None
    assert (np.diff(minutes) > 0).all()
    windows = read_run(tmp_path / "run").monitor.windows
    assert minutes[-1] * 60 == pytest.approx(sum(window.wall_s for window in windows))


def test_importing_footplate_and_its_callbacks_imports_no_plotly():
    script = "import sys, footplate as fp; fp.Report; assert not {'plotly', 'cv2', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_running_run_has_a_report(tmp_path):
    from footplate.training.lock import only_writer

    write_metrics(tmp_path)
    write_hparams(tmp_path, lr=0.1)
    with only_writer(tmp_path):
        assert 'class="badge running"' in fp.report(tmp_path).read_text()
