"""`ModelCheckpoint`: when it saves, its file names, and the checkpoints that it keeps."""

from __future__ import annotations

import math
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.small import Classifier, loader

import footplate as fp
from footplate import checkpoint
from footplate.callbacks.model_checkpoint import format_name
from footplate.checkpoint.storage.local import LocalStore


class Scripted(Classifier):
    """Its `score` in each validation is the next of a list."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("score", self.scores[self.current_epoch])


def kept(directory: Path) -> list[str]:
    """Names of the checkpoints in a directory, without links."""
    return sorted(path.name.removesuffix(".ckpt") for path in directory.iterdir() if not path.is_symlink())


def link(directory: Path, name: str) -> str:
    return (directory / f"{name}.ckpt").resolve().name.removesuffix(".ckpt")


@pytest.fixture
def scripted(make_trainer, tmp_path):
    """Runs a script of scores under a saver; returns the saver."""

    def run(scores: list[float], saver: fp.ModelCheckpoint) -> fp.ModelCheckpoint:
        trainer = make_trainer(max_epochs=len(scores), callbacks=[saver], num_sanity_val_steps=1)
        trainer.fit(Scripted(scores), loader(20), loader(20))
        return saver

    return run


def test_without_a_monitor_the_latest_is_kept(make_trainer):
    trainer = make_trainer(max_epochs=3)
    trainer.fit(Classifier(), loader(), loader(20))
    saver = trainer.checkpoint_callback
    assert kept(saver.dirpath) == ["epoch=2-step=36"]
    assert link(saver.dirpath, "last") == "epoch=2-step=36"
    assert saver.best_model_path == saver.last_model_path


@pytest.mark.parametrize(
    ("mode", "scores", "best", "top"),
    [
        ("min", [3.0, 1.0, 2.0, 4.0], 1, {1, 2}),
        ("max", [3.0, 1.0, 2.0, 4.0], 3, {0, 3}),
        ("min", [1.0, 1.0, 1.0], 0, {0, 1}),
        ("max", [2.0, 2.0, 3.0, 3.0], 2, {2, 3}),
        ("min", [math.nan, 2.0, math.nan, 1.0], 3, {1, 3}),
        ("max", [math.nan, math.nan, 1.0], 2, {0, 2}),
        ("min", [math.inf, 2.0, -math.inf], 2, {1, 2}),
    ],
)
def test_the_best_are_kept_through_ties_and_nans(mode, scores, best, top, scripted):
    saver = scripted(
        scores, fp.ModelCheckpoint(monitor="score", mode=mode, save_top_k=2, filename="{epoch}", save_last=False)
    )
    assert kept(saver.dirpath) == [f"epoch={epoch}" for epoch in sorted(top)]
    assert Path(saver.best_model_path).name == f"epoch={best}.ckpt"
    assert saver.best_model_score == scores[best]
    assert link(saver.dirpath, "best") == f"epoch={best}"


def test_the_last_is_kept_though_it_is_not_among_the_best(scripted):
    saver = scripted([1.0, 2.0, 3.0], fp.ModelCheckpoint(monitor="score", filename="{epoch}"))
    assert kept(saver.dirpath) == ["epoch=0", "epoch=2"]
    assert (link(saver.dirpath, "best"), link(saver.dirpath, "last")) == ("epoch=0", "epoch=2")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"save_top_k": -1}, ["epoch=0", "epoch=1", "epoch=2"]),
        ({"save_top_k": 2}, ["epoch=1", "epoch=2"]),
        ({"save_top_k": 2, "save_last": False}, ["epoch=1", "epoch=2"]),
        ({"save_top_k": 0}, ["epoch=2"]),
        ({"save_top_k": 0, "save_last": False}, []),
        ({"every_n_epochs": 2, "save_top_k": -1, "save_last": False}, ["epoch=1"]),
    ],
)
def test_how_many_are_kept(settings, names, scripted):
    saver = scripted([3.0, 1.0, 2.0], fp.ModelCheckpoint(filename="{epoch}", **settings))
    assert kept(saver.dirpath) == names


def test_the_latest_few_stay_the_latest_few_when_a_run_goes_on(make_trainer):
    for epochs, names in ((2, ["epoch=0", "epoch=1"]), (5, ["epoch=2", "epoch=3", "epoch=4"])):
        saver = fp.ModelCheckpoint(filename="{epoch}", save_top_k=3)
        make_trainer(max_epochs=epochs, callbacks=[saver]).fit(Classifier(), loader(20), ckpt_path="last")
        assert kept(saver.dirpath) == names
        assert Path(saver.best_model_path).name == f"{names[-1]}.ckpt"


def test_saves_follow_validation_when_there_is_one_and_the_epoch_when_there_is_none(make_trainer, tmp_path):
    for name, data, steps in (("with", loader(20), [6, 12]), ("without", None, [12])):
        saver = fp.ModelCheckpoint(save_top_k=-1)
        make_trainer(max_epochs=1, val_check_interval=0.5, callbacks=[saver], default_root_dir=tmp_path / name).fit(
            Classifier(), loader(), data
        )
        expected = [f"epoch=0-step={step}" for step in steps] if data else ["epoch=0-step=12"]
        assert kept(saver.dirpath) == sorted(expected)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [5, 10, 15, 20]), (2, [5, 10]), (4, [5])])
def test_every_n_train_steps_counts_optimizer_steps_and_saves_each_once(accumulate, steps, make_trainer):
    saver = fp.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, filename="{step}", save_last=False)
    make_trainer(accumulate_grad_batches=accumulate, callbacks=[saver]).fit(Classifier(), loader())
    assert kept(saver.dirpath) == sorted(f"step={step}" for step in steps)


def test_what_was_trained_after_the_last_save_is_saved_at_the_end(make_trainer):
    saver = fp.ModelCheckpoint(every_n_train_steps=5, filename="{step}")
    make_trainer(max_epochs=1, callbacks=[saver]).fit(Classifier(), loader())
    assert kept(saver.dirpath) == ["step=12"]


def test_a_time_interval(make_trainer):
    saver = fp.ModelCheckpoint(train_time_interval=timedelta(microseconds=1), save_top_k=-1, filename="{step}")
    make_trainer(max_epochs=1, callbacks=[saver]).fit(Classifier(), loader())
    assert len(kept(saver.dirpath)) == 12


def test_names_hold_metrics_in_the_format_that_was_asked_for(scripted):
    saver = scripted([0.12345], fp.ModelCheckpoint(monitor="score", filename="{epoch:03d}-{score:.2f}-{step}"))
    assert kept(saver.dirpath) == ["epoch=000-score=0.12-step=2"]
    plain = scripted(
        [0.12345], fp.ModelCheckpoint(monitor="score", filename="m-{epoch}-{score:.3f}", auto_insert_metric_name=False)
    )
    assert "m-0-0.123" in kept(plain.dirpath)


@given(
    st.dictionaries(st.text("abcdefgh_/", min_size=1, max_size=8), st.floats(allow_nan=True), min_size=1, max_size=3),
    st.sampled_from(["", ":.3f", ":.2e"]),
    st.booleans(),
)
def test_a_metrics_name_or_value_never_makes_a_directory(metrics, spec, insert):
    template = "-".join(f"{{{name}{spec}}}" for name in metrics)
    filled = format_name(template, metrics, insert)
    assert "/" not in filled
    assert filled.count("=") == (len(metrics) if insert else 0)
    if spec:
        assert all(format(value, spec[1:]) in filled for value in metrics.values())


@pytest.mark.parametrize("template", ["../{epoch}", "/tmp/{epoch}"])
def test_a_name_stays_inside_its_directory(template):
    with pytest.raises(fp.ConfigError, match="inside dirpath"):
        format_name(template, {"epoch": 1})


@pytest.mark.parametrize("filename", ["{epoch}-{val/loss:.2f}", "best/{epoch}"])
def test_a_name_with_a_slash_can_be_resumed_from(filename, make_trainer):
    class Slashed(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", 0.5)

    make_trainer(max_epochs=1, callbacks=[fp.ModelCheckpoint(filename=filename)]).fit(Slashed(), loader(), loader(20))
    resumed = make_trainer(max_epochs=2, callbacks=[fp.ModelCheckpoint(filename=filename)])
    epochs = []
    module = Slashed()
    module.on_train_epoch_start = lambda: epochs.append(module.current_epoch)
    resumed.fit(module, loader(), loader(20), ckpt_path="last")
    assert epochs == [1]


def test_an_earlier_runs_files_are_not_overwritten(make_trainer):
    for _ in range(3):
        saver = fp.ModelCheckpoint(filename="model")
        make_trainer(max_epochs=1, callbacks=[saver]).fit(Classifier(), loader(20))
    assert kept(saver.dirpath) == ["model", "model-v1", "model-v2"]
    assert link(saver.dirpath, "last") == "model-v2"


def test_without_a_version_counter_they_are(make_trainer):
    for _ in range(2):
        saver = fp.ModelCheckpoint(filename="model", enable_version_counter=False)
        make_trainer(max_epochs=1, callbacks=[saver]).fit(Classifier(), loader(20))
    assert kept(saver.dirpath) == ["model"]


def test_at_every_moment_there_is_a_complete_one_once_there_was_one(scripted, monkeypatch):
    """At each deletion and each rename, the checkpoint that is being replaced is never the only one."""
    seen: list[int] = []
    delete = checkpoint.delete

    def watched(path: Path) -> None:
        seen.append(sum(checkpoint.is_complete(entry) for entry in path.parent.iterdir() if not entry.is_symlink()))
        delete(path)

    monkeypatch.setattr(checkpoint, "delete", watched)
    scripted([3.0, 2.0, 1.0, 5.0, 0.5], fp.ModelCheckpoint(monitor="score"))
    assert len(seen) >= 4
    assert min(seen) >= 2


def test_a_failed_save_deletes_nothing(make_trainer, monkeypatch):
    saver = fp.ModelCheckpoint(filename="{epoch}")
    write = LocalStore.write

    def fails_later(self, path, state, meta):
        if meta["epoch"] == 1:
            raise fp.CheckpointError("The disk is full")
        write(self, path, state, meta)

    monkeypatch.setattr(LocalStore, "write", fails_later)
    with pytest.raises(fp.CheckpointError):
        make_trainer(max_epochs=4, callbacks=[saver]).fit(Classifier(), loader(20))
    assert checkpoint.newest([saver.dirpath]).name == "epoch=0.ckpt"


class Terminated(fp.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_terminated_and_resumed_again_and_again_only_the_best_and_the_last_are_left(make_trainer):
    def saver() -> fp.ModelCheckpoint:
        return fp.ModelCheckpoint(monitor="val_loss", mode="max")

    for step in (15, 30, 44):
        with pytest.raises(SystemExit):
            make_trainer(max_epochs=9, callbacks=[Terminated(step), saver()]).fit(
                Classifier(), loader(), loader(20), ckpt_path="last"
            )
    directory = make_trainer().run_dir / "checkpoints"
    assert kept(directory) == ["epoch=0-step=12", "epoch=3-step=44"]


def test_what_is_known_of_the_best_survives_a_resume(make_trainer):
    def run(scores, ckpt_path):
        saver = fp.ModelCheckpoint(monitor="score", filename="{epoch}", save_top_k=1)
        make_trainer(max_epochs=len(scores), callbacks=[saver]).fit(
            Scripted(scores), loader(20), loader(20), ckpt_path=ckpt_path
        )
        return saver

    run([3.0, 1.0], None)
    saver = run([3.0, 1.0, 2.0, 4.0], "last")
    assert kept(saver.dirpath) == ["epoch=1", "epoch=3"]
    assert saver.best_model_score == 1.0


def test_a_second_fit_ranks_afresh(make_trainer):
    saver = fp.ModelCheckpoint(monitor="score", filename="{epoch}")
    trainer = make_trainer(max_epochs=1, callbacks=[saver])
    trainer.fit(Scripted([0.1]), loader(20), loader(20))
    trainer.fit(Scripted([0.7]), loader(20), loader(20))
    assert saver.best_model_score == 0.7


def test_several_savers_have_rhythms_of_their_own(make_trainer, tmp_path):
    by_step = fp.ModelCheckpoint(tmp_path / "steps", every_n_train_steps=6, save_top_k=-1)
    by_loss = fp.ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    make_trainer(callbacks=[by_step, by_loss]).fit(Classifier(), loader(), loader(20))
    assert len(kept(tmp_path / "steps")) == 4
    assert 1 <= len(kept(tmp_path / "best")) <= 2


def test_weights_only_leaves_out_what_resuming_needs(make_trainer):
    saver = fp.ModelCheckpoint(save_weights_only=True)
    make_trainer(max_epochs=1, callbacks=[saver]).fit(Classifier(width=5), loader())
    assert Classifier.load_from_checkpoint(saver.last_model_path).hparams.width == 5
    with pytest.raises(fp.CheckpointError, match="holds weights but no training state"):
        make_trainer().fit(Classifier(width=5), loader(), ckpt_path=saver.last_model_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"mode": "best"}, 'expected "min" or "max"'),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_epochs": 1, "every_n_train_steps": 5}, "use one of"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(fp.ConfigError, match=message):
        fp.ModelCheckpoint(**settings)


def test_a_misspelt_monitor_is_named_after_the_first_batch_with_the_nearest(make_trainer):
    trainer = make_trainer(callbacks=[fp.ModelCheckpoint(monitor="val_los")])
    with pytest.raises(fp.ConfigError, match=r'ModelCheckpoint monitors "val_los".*Did you mean "val_loss"'):
        trainer.fit(Classifier(), loader(), loader(20))
    assert trainer.global_step == 1


# In one directory with others, and with what others have done to it


def numbered(saver: fp.ModelCheckpoint) -> dict[str, float]:
    """The score of each best checkpoint when it was saved."""
    return {Path(path).name: checkpoint.read_meta(path)["metrics"]["score"] for path in saver.best_k_models}


def test_two_savers_in_one_directory_leave_each_others_files_alone(make_trainer, tmp_path):
    low = fp.ModelCheckpoint(tmp_path / "all", monitor="score", mode="min", filename="{epoch}", save_last=False)
    high = fp.ModelCheckpoint(tmp_path / "all", monitor="score", mode="max", filename="{epoch}")
    scores = [2.0, 1.0, 4.0, 3.0, 0.5, 2.5]
    trainer = make_trainer(max_epochs=len(scores), callbacks=[low, high])
    trainer.fit(Scripted(scores), loader(20), loader(20))
    assert list(numbered(low).values()) == [0.5]
    assert list(numbered(high).values()) == [4.0]
    paths = {low.best_model_path, high.best_model_path, high.last_model_path}
    assert set(kept(tmp_path / "all")) == {Path(path).stem for path in paths}


@pytest.mark.parametrize("filename", ["model", "last", "best"])
def test_a_name_without_fields_does_not_overwrite_the_best_with_the_last(filename, scripted):
    scores = [3.0, 1.0, 2.0, 4.0]
    saver = scripted(scores, fp.ModelCheckpoint(monitor="score", filename=filename, save_top_k=2))
    assert sorted(numbered(saver).values()) == [1.0, 2.0]
    assert checkpoint.read_meta(saver.best_model_path)["metrics"]["score"] == 1.0
    assert checkpoint.read_meta(saver.last_model_path)["epoch"] == 3
    assert checkpoint.load(saver.dirpath / "last.ckpt")["epoch"] == 3
    assert checkpoint.load(saver.dirpath / "best.ckpt")["epoch"] == 1
    assert len(kept(saver.dirpath)) == 3


def test_what_a_killed_process_did_not_delete_the_next_one_does(make_trainer, monkeypatch):
    def run(epochs: int) -> fp.Trainer:
        trainer = make_trainer(max_epochs=epochs, callbacks=[fp.ModelCheckpoint(filename="{epoch}")])
        trainer.fit(Classifier(), loader(20), ckpt_path="last")
        return trainer

    def dies(path: Path) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "delete", dies)
        with pytest.raises(fp.CheckpointError, match="killed"):
            run(2)
    directory = make_trainer().run_dir / "checkpoints"
    assert kept(directory) == ["epoch=0", "epoch=1"]
    run(3)
    assert kept(directory) == ["epoch=2"]


def test_links_that_lead_nowhere_are_no_obstacle(make_trainer):
    trainer = make_trainer(max_epochs=2, callbacks=[fp.ModelCheckpoint(monitor="val_loss", save_top_k=-1)])
    trainer.fit(Classifier(), loader(), loader(20))
    directory = trainer.run_dir / "checkpoints"
    for name in ("last", "best"):
        (directory / f"{name}.ckpt").unlink()
        (directory / f"{name}.ckpt").symlink_to("gone.ckpt")
    resumed = make_trainer(max_epochs=3, callbacks=[fp.ModelCheckpoint(monitor="val_loss", save_top_k=-1)])
    resumed.fit(Classifier(), loader(), loader(20), ckpt_path="last")
    assert resumed.global_step == 36
    assert link(directory, "last") == "epoch=2-step=36"


def test_a_best_one_that_was_deleted_by_hand_is_no_longer_the_best(make_trainer):
    import shutil

    def saver() -> fp.ModelCheckpoint:
        return fp.ModelCheckpoint(monitor="score", filename="{epoch}", save_top_k=2)

    scores = [1.0, 2.0, 3.0]
    first = saver()
    make_trainer(max_epochs=2, callbacks=[first]).fit(Scripted(scores), loader(20), loader(20))
    shutil.rmtree(first.best_model_path)
    second = saver()
    make_trainer(max_epochs=3, callbacks=[second]).fit(Scripted(scores), loader(20), loader(20), ckpt_path="last")
    assert second.best_model_score == 2.0
    assert kept(second.dirpath) == ["epoch=1", "epoch=2"]


@pytest.mark.parametrize("chosen", ["its path", "the link", "best"])
def test_the_checkpoint_that_a_run_was_resumed_from_by_choice_is_not_deleted(chosen, make_trainer):
    def saver() -> fp.ModelCheckpoint:
        return fp.ModelCheckpoint(monitor="val_loss", save_last=False)

    first = make_trainer(max_epochs=1, callbacks=[saver()])
    first.fit(Classifier(), loader(), loader(20))
    path = Path(first.checkpoint_callback.best_model_path)
    names = {"its path": path, "the link": path.with_name("best.ckpt"), "best": "best"}

    second = make_trainer(max_epochs=3, callbacks=[saver()])
    second.fit(Classifier(), loader(), loader(20), ckpt_path=names[chosen])

    better = Path(second.checkpoint_callback.best_model_path)
    assert kept(path.parent) == sorted([path.name.removesuffix(".ckpt"), better.name.removesuffix(".ckpt")])
    assert better != path


def test_a_run_that_continues_from_its_last_keeps_no_more_than_it_should(make_trainer):
    for epochs in (1, 2, 3):
        trainer = make_trainer(max_epochs=epochs)
        trainer.fit(Classifier(), loader(), loader(20), ckpt_path="last")
    assert kept(trainer.checkpoint_callback.dirpath) == ["epoch=2-step=36"]


def test_every_n_epochs_of_zero_saves_in_no_epoch(make_trainer):
    trainer = make_trainer(callbacks=[fp.ModelCheckpoint(every_n_epochs=0, save_last=False)])
    trainer.fit(Classifier(), loader(), loader(20))
    assert kept(trainer.checkpoint_callback.dirpath) == []


@pytest.mark.parametrize(("save_last", "names"), [(False, ["step=12"]), (True, ["step=12", "step=9"])])
def test_a_save_by_step_waits_for_a_metric_that_validation_will_log(save_last, names, make_trainer):
    saver = fp.ModelCheckpoint(
        monitor="val_loss", filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=save_last
    )
    during: list[list[str]] = []

    class Looking(fp.Callback):
        def on_validation_start(self, trainer, pl_module):
            trainer.wait_for_save()
            during.append(kept(saver.dirpath))

    trainer = make_trainer(max_epochs=1, callbacks=[Looking(), saver], num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(), loader(20))

    assert during == [["step=9"] if save_last else []]  # the last is saved without its metric, for safety
    assert kept(saver.dirpath) == ["step=12"]
    assert saver.best_model_score == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_a_save_at_the_end_of_an_epoch_waits_for_a_metric_of_a_later_validation(make_trainer):
    saver = fp.ModelCheckpoint(monitor="val_loss", filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    trainer = make_trainer(max_epochs=4, callbacks=[saver], num_sanity_val_steps=0, check_val_every_n_epoch=2)
    trainer.fit(Classifier(), loader(), loader(20))
    assert set(saver.best_k_models) == {str(saver.dirpath / f"epoch={epoch}.ckpt") for epoch in (1, 2, 3)}


def test_a_metric_that_nothing_logs_is_an_error_once_validation_has_run(make_trainer):
    class Logging(fp.Callback):
        """A user's callback, which might log anything."""

    Logging.__module__ = "mine"
    saver = fp.ModelCheckpoint(monitor="val_los")
    trainer = make_trainer(callbacks=[saver, Logging()], num_sanity_val_steps=0)
    with pytest.raises(fp.ConfigError, match=r'"val_los".*nothing of that name.*Did you mean "?val_loss'):
        trainer.fit(Classifier(), loader(), loader(20))


@pytest.mark.parametrize(("monitor", "best"), [("step", "epoch=2-step=36"), ("epoch", "epoch=2-step=36")])
def test_the_epoch_and_the_step_can_be_monitored(monitor, best, make_trainer):
    trainer = make_trainer(max_epochs=3, callbacks=[fp.ModelCheckpoint(monitor=monitor, mode="max")])
    trainer.fit(Classifier(), loader(), loader(20))
    assert kept(trainer.checkpoint_callback.dirpath) == [best]
    assert trainer.checkpoint_callback.best_model_score == {"step": 36, "epoch": 2}[monitor]


def test_what_is_logged_as_the_step_is_what_names_and_monitors_it(make_trainer):
    class Counting(Classifier):
        def on_train_epoch_end(self):
            self.log("step", 100.0 * (self.current_epoch + 1))

    trainer = make_trainer(callbacks=[fp.ModelCheckpoint(monitor="step", mode="max", filename="{step}")])
    trainer.fit(Counting(), loader())
    assert kept(trainer.checkpoint_callback.dirpath) == ["step=200"]


def test_a_metric_of_the_training_epoch_is_that_of_the_epoch_which_ends(make_trainer):
    scores: list[float] = []

    class Ending(fp.Callback):
        order = 3  # after the saver

        def on_train_epoch_end(self, trainer, pl_module):
            scores.append(trainer.checkpoint_callback.current_score)
            assert scores[-1] == pytest.approx(float(trainer.callback_metrics["train_loss_epoch"]))

    saver = fp.ModelCheckpoint(monitor="train_loss_epoch")
    make_trainer(max_epochs=2, callbacks=[saver, Ending()]).fit(Classifier(), loader(), loader(20))
    assert len(set(scores)) == 2


@pytest.mark.parametrize(("asked", "saved"), [(True, ["epoch=0-step=2"]), (False, [])])
def test_save_on_exception_saves_without_a_last(asked, saved, make_trainer):
    class Failing(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("a mistake")

    trainer = make_trainer(callbacks=[fp.ModelCheckpoint(save_top_k=0, save_last=False, save_on_exception=asked)])
    with pytest.raises(RuntimeError, match="a mistake"):
        trainer.fit(Failing(), loader())
    assert kept(trainer.checkpoint_callback.dirpath) == saved


class Interrupted(Classifier):
    """Gets SIGTERM in its 15th step, and optionally raises an error there."""

    raises = False

    def training_step(self, batch, batch_idx):
        if self.global_step == 14 and self.raises:
            raise OSError("the disk is gone")
        if self.global_step == 14:
            signal.raise_signal(signal.SIGTERM)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("raises", [False, True])
def test_a_saver_of_weights_alone_does_not_keep_another_from_saving_the_run(raises, make_trainer, tmp_path):
    def savers():
        weights = fp.ModelCheckpoint(tmp_path / "weights", save_weights_only=True, every_n_train_steps=7)
        return [weights, fp.ModelCheckpoint(tmp_path / "whole", every_n_train_steps=100)]

    model = Interrupted()
    model.raises = raises
    with pytest.raises(OSError if raises else SystemExit):
        make_trainer(callbacks=savers()).fit(model, loader())
    assert kept(tmp_path / "whole") == [f"epoch=1-step={14 if raises else 15}"]
    again = make_trainer(callbacks=savers())
    again.fit(Classifier(), loader(), ckpt_path="last")
    assert again.global_step == 24


def test_the_last_to_train_on_is_the_newest_that_holds_a_run(make_trainer, tmp_path):
    weights = fp.ModelCheckpoint(tmp_path / "run", filename="w-{step}", save_weights_only=True, every_n_train_steps=5)
    whole = fp.ModelCheckpoint(tmp_path / "run", every_n_train_steps=4, save_last=False)
    with pytest.raises(SystemExit):
        make_trainer(callbacks=[weights, whole]).fit(Interrupted(), loader())
    newest = checkpoint.newest([tmp_path / "run"])
    assert newest is not None
    assert newest.name == "w-step=15.ckpt"

    class Notes(fp.Callback):
        started_at = -1

        def on_train_start(self, trainer, pl_module):
            self.started_at = trainer.global_step

    notes = Notes()
    make_trainer(callbacks=[weights, whole, notes]).fit(Classifier(), loader(), ckpt_path="last")
    assert notes.started_at == 12


def test_ckpt_path_shows_last_ckpt_where_that_links_to_what_was_loaded(make_trainer, tmp_path):
    settings = {"callbacks": [fp.ModelCheckpoint(tmp_path / "kept")]}
    make_trainer(max_epochs=1, **settings).fit(Classifier(), loader())
    again = make_trainer(max_epochs=2, **settings)
    again.fit(Classifier(), loader(), ckpt_path="last")
    assert again.ckpt_path == str(tmp_path / "kept" / "last.ckpt")
    again.validate(Classifier(), loader(40), ckpt_path="best")
    assert again.ckpt_path == again.checkpoint_callback.best_model_path
