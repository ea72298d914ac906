"""A trainer in a notebook: before, during and after a training."""

from __future__ import annotations

from models.small import Classifier, loader

import footplate as fp


def fact(name: str, value: object) -> str:
    return f'>{name}</th><td style="text-align: left">{value}<'


class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss <b>", loss)
        return loss


def test_a_trainer_that_has_not_trained_shows_where_it_would(make_trainer):
    shown = make_trainer(max_epochs=3)._repr_html_()
    assert fact("accelerator", "cpu") in shown
    assert fact("precision", "32-true") in shown
    assert fact("epochs", "0 of 3") in shown
    assert "metric" not in shown


def test_a_trained_one_shows_its_progress_and_its_last_metrics(make_trainer):
    trainer = make_trainer(max_epochs=2, log_every_n_steps=5)
    trainer.fit(Logs(), loader())
    shown = trainer._repr_html_()
    assert fact("status", "finished: fit") in shown
    assert fact("epochs", "2 of 2") in shown
    assert fact("steps", trainer.global_step) in shown
    assert f"{trainer.callback_metrics['loss <b>'].item():.6g}" in shown
    assert "loss &lt;b&gt;" in shown


def test_displaying_it_in_a_training_reads_nothing_from_the_device(make_trainer, monkeypatch):
    shown = []

    class Displays(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with monkeypatch.context() as patch:
                patch.setattr("torch.Tensor.__float__", None)
                patch.setattr("torch.Tensor.item", None)
                patch.setattr("torch.Tensor.tolist", None)
                shown.append(trainer._repr_html_())

    make_trainer(max_steps=2, callbacks=Displays()).fit(Logs(), loader())
    assert [fact("steps", f"{step} of 2") in text for step, text in zip((1, 2), shown, strict=True)] == [True, True]


def test_the_whole_table_has_no_scripts(make_trainer):
    assert "<script" not in make_trainer(default_root_dir="runs/<script>")._repr_html_()
