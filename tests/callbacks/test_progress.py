"""The progress display: its contents in a terminal and elsewhere, and its low cost."""

from __future__ import annotations

import io
import re

import pytest
from models.small import Classifier, loader

import footplate as fp
from footplate.callbacks.progress import clock


class Shows(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


@pytest.fixture
def shown(make_trainer):
    """Train with a bar on a stream. Return the output."""

    def run(terminal: bool, data=None, **kwargs) -> str:
        stream = io.StringIO()
        trainer = make_trainer(callbacks=[fp.ProgressBar(stream, terminal=terminal)], **kwargs)
        trainer.fit(Shows(), loader() if data is None else data, loader(20))
        return stream.getvalue()

    return run


def test_without_a_terminal_there_is_one_plain_line_for_each_epoch(shown):
    lines = shown(terminal=False, max_epochs=2, log_every_n_steps=5).splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"epoch 1/2  12/12  [\d,.]+/s  loss \d\.\d+", lines[0])
    assert lines[1].startswith("epoch 2/2")


def test_in_a_terminal_a_bar_is_drawn_with_the_metrics_and_each_epoch_leaves_a_line(shown):
    written = shown(terminal=True, max_epochs=2, log_every_n_steps=1)
    assert "━" in written
    left = [line for line in plain(written).splitlines() if re.search(r"epoch \d/2  12/12  [\d,.]+/s  loss", line)]
    assert len(left) == 2


def plain(written: str) -> str:
    """The output without control sequences."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written).replace("\r", "\n")


def test_an_epoch_of_unknown_length_counts_batches(shown):
    class Endless:
        def __iter__(self):
            return iter(loader())

    assert "12 batches" in shown(terminal=False, data=Endless(), max_epochs=1)


def test_redrawing_is_bound_to_time_and_not_to_steps(shown, monkeypatch):
    monkeypatch.setattr("footplate.callbacks.progress.REDRAW_S", 3600.0)
    draws = []
    draw = fp.ProgressBar._draw
    monkeypatch.setattr(fp.ProgressBar, "_draw", lambda self, *args: (draws.append(args[2]), draw(self, *args)))
    shown(terminal=True, max_epochs=1, num_sanity_val_steps=0)
    assert draws == [1, 1]  # once in the epoch, once in validation


def test_what_is_printed_stands_above_the_bar(make_trainer):
    stream = io.StringIO()

    class Prints(Shows):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 3:
                self.print("hello [bold]")

    make_trainer(callbacks=[fp.ProgressBar(stream, terminal=True)], max_epochs=1).fit(Prints(), loader())
    written = plain(stream.getvalue())
    assert any(line.strip() == "hello [bold]" for line in written.splitlines())
    assert "epoch 1/1" in written.split("hello")[1]


def test_an_error_begins_on_a_line_of_its_own(make_trainer):
    stream = io.StringIO()

    class Fails(Shows):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 3:
                raise ZeroDivisionError

    trainer = make_trainer(callbacks=[fp.ProgressBar(stream, terminal=True)], max_epochs=1)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(), loader())
    last = stream.getvalue().rsplit("\n", 1)[-1]
    assert plain(last).strip() == ""


def test_durations_are_read_at_a_glance():
    assert (clock(5), clock(125), clock(5025)) == ("0:05", "2:05", "1:23:45")
