"""The progress display in a notebook: one output of a cell, however long the training is."""

from __future__ import annotations

import io
import re
import textwrap

import nbformat
import pytest
from models.small import Classifier, loader
from nbclient import NotebookClient

import footplate as fp
from footplate.callbacks import notebook_progress, progress


class Display:
    """Records what IPython would show."""

    def __init__(self) -> None:
        self.made = 0
        self.shown: list[dict[str, str]] = []

    def __call__(self, bundle, raw, display_id):
        self.made += 1
        self.update(bundle, raw)
        return self

    def update(self, bundle, raw):
        assert raw
        self.shown.append(bundle)


@pytest.fixture
def display(monkeypatch) -> Display:
    display = Display()
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    return display


class Shows(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss <b>", loss, prog_bar=True)
        return loss


def test_a_notebook_has_one_output_for_a_training(tmp_path):
    code = """
    import torch, footplate as fp
    class Net(fp.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
        def training_step(self, batch, batch_idx):
            loss = self.net(batch["x"].float()).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    rows = fp.Table({"x": torch.randn(2000, 4).tolist()})
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_monitor"), False)
    trainer = fp.Trainer(max_epochs=3, **quiet)
    trainer.fit(Net(), fp.Loader(rows, 4, shuffle=True))
    """
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(code))])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    (output,) = book.cells[0].outputs
    assert output.output_type == "display_data"
    lines = output.data["text/plain"].splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"epoch 3/3  500/500  [\d,.]+/s  loss \S+", lines[-1])


def test_the_display_is_updated_and_the_text_escaped(make_trainer, display):
    make_trainer(callbacks=fp.ProgressBar(), max_epochs=2, log_every_n_steps=1).fit(Shows(), loader(), loader(20))
    assert display.made == 1
    assert len(display.shown) > 4
    assert any('<progress value="1" max="12">' in bundle["text/html"] for bundle in display.shown)
    assert "<progress" not in display.shown[-1]["text/html"]
    assert "loss &lt;b&gt;" in display.shown[-1]["text/html"]
    assert display.shown[-1]["text/plain"].count("12/12") == 2


def test_each_call_has_a_display_that_ends_full(make_trainer, display):
    trainer = make_trainer(callbacks=fp.ProgressBar(), max_epochs=1)
    trainer.fit(Shows(), loader())
    trainer.validate(Shows(), loader(20), verbose=False)
    assert display.made == 2
    assert re.match(r"validation  (\d+)/\1  ", display.shown[-1]["text/plain"])


def test_of_many_epochs_the_last_lines_stay(display):
    shown = notebook_progress.NotebookProgress()
    for epoch in range(13):
        shown.add(f"epoch {epoch}")
    assert display.shown[-1]["text/plain"].splitlines() == ["… 3 earlier epochs", *(f"epoch {n}" for n in range(3, 13))]


def test_a_stream_that_was_given_gets_the_lines(make_trainer, display):
    stream = io.StringIO()
    make_trainer(callbacks=fp.ProgressBar(stream), max_epochs=1).fit(Shows(), loader())
    assert "epoch 1/1" in stream.getvalue()
    assert display.made == 0


def test_this_process_is_no_notebook():
    assert not notebook_progress.in_notebook()
