"""Estimators: trained by global step in a directory and resumed from it, on Fashion-MNIST from the demo's tables."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from object_storage import make_bucket, s3_settings, serve_s3
from ports import free_port
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate import checkpoint
from footplate.compat.estimator import (
    Estimator,
    EstimatorSpec,
    EvalSpec,
    Exporter,
    FinalExporter,
    LatestExporter,
    ModeKeys,
    RunConfig,
    TPUConfig,
    TPUEstimator,
    TPUEstimatorSpec,
    TrainSpec,
    WarmStartSettings,
    get_module,
    train_and_evaluate,
)
from footplate.core.errors import CheckpointError, ConfigError
from footplate.demo import TABLES

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}


@pytest.fixture(scope="module")
def images() -> TensorDataset:
    """1,000 images of the demo's table, each as 7 × 7 means, and their classes."""
    loader = fp.Loader(fp.Table(TABLES / "train"), 1000, seed=0)
    batch = next(iter(loader))
    return TensorDataset(F.avg_pool2d(batch["image"].float() / 255, 4).flatten(1), batch["label"])


@pytest.fixture
def inputs(images):
    def make(shuffle=True):
        return DataLoader(images, 50, shuffle=shuffle)

    return make


def make_net() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def model_fn(features, labels, mode, params):
    net = get_module("net", make_net)
    logits = net(features)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"class": logits.argmax(1), "logits": logits})
    return EstimatorSpec(
        mode,
        loss=F.cross_entropy(logits, labels),
        train_op=lambda: torch.optim.AdamW(net.parameters(), lr=params["lr"]),
        eval_metric_ops={"accuracy": (logits.argmax(1) == labels).float().mean()},
    )


def estimator(
    model_dir: str | Path, function=model_fn, every=10, keep=None, warm_start_from=None, **trainer
) -> Estimator:
    config = RunConfig(
        tf_random_seed=3, save_checkpoints_steps=every, keep_checkpoint_max=keep, trainer={**QUIET, **trainer}
    )
    return Estimator(function, model_dir, config, {"lr": 5e-3}, warm_start_from)


def weights(classifier: Estimator) -> dict[str, torch.Tensor]:
    return checkpoint.load(classifier.latest_checkpoint())["state_dict"]


def saved(model_dir: Path) -> set[str]:
    return {path.name for path in (model_dir / "checkpoints").iterdir() if not path.is_symlink()}


def test_it_learns_and_says_how_well(inputs, tmp_path):
    classifier = estimator(tmp_path)
    assert classifier.train(inputs, steps=60) is classifier
    metrics = classifier.evaluate(lambda: inputs(shuffle=False))
    assert metrics.keys() == {"loss", "accuracy", "global_step"}
    assert metrics["global_step"] == 60
    assert metrics["accuracy"] > 0.6


def test_the_first_call_that_makes_the_modules_leaves_no_trace_in_them(inputs, tmp_path):
    classifier = estimator(tmp_path)
    classifier._prepare(ModeKeys.TRAIN, inputs)
    net = classifier._model.parts["net"]
    assert torch.equal(net[1].running_mean, torch.zeros(32))
    assert int(net[1].num_batches_tracked) == 0
    assert net.training
    assert net[3].training


def test_nor_does_the_call_that_makes_those_of_another_mode(inputs, tmp_path):
    classifier = estimator(tmp_path)
    train_and_evaluate(classifier, TrainSpec(inputs, max_steps=4), EvalSpec(inputs, steps=1))
    assert int(weights(classifier)["parts.net.1.num_batches_tracked"]) == 4


def test_modules_are_in_training_mode_though_the_call_that_made_them_failed(inputs, tmp_path):
    def failing(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        if params.pop("fails"):
            raise ValueError("once")
        return spec

    classifier = Estimator(failing, tmp_path, params={"lr": 0.1, "fails": True})
    with pytest.raises(ValueError, match="once"):
        classifier._prepare(ModeKeys.TRAIN, inputs)
    assert all(module.training for module in classifier._model.modules())


def test_a_seed_of_an_estimator_is_no_other_trainers(inputs, tmp_path, monkeypatch):
    monkeypatch.delenv("FOOTPLATE_SEED", raising=False)
    estimator(tmp_path).train(inputs, steps=1)
    assert "FOOTPLATE_SEED" not in os.environ


def test_steps_add_up_and_max_steps_is_a_place_to_stop(inputs, tmp_path):
    classifier = estimator(tmp_path)
    classifier.train(inputs, steps=7).train(inputs, steps=5)
    assert classifier.global_step == 12
    classifier.train(inputs, max_steps=12)
    assert classifier.global_step == 12
    classifier.train(inputs, max_steps=15)
    assert classifier.global_step == 15


def test_checkpoints_are_named_by_global_step(inputs, tmp_path):
    estimator(tmp_path).train(inputs, steps=25)
    assert saved(tmp_path) == {"model-10.ckpt", "model-20.ckpt", "model-25.ckpt"}


def test_the_newest_checkpoints_are_kept_also_when_training_goes_on(inputs, tmp_path):
    estimator(tmp_path, every=5, keep=3).train(inputs, steps=20)
    assert saved(tmp_path) == {"model-10.ckpt", "model-15.ckpt", "model-20.ckpt"}
    estimator(tmp_path, every=5, keep=3).train(inputs, steps=5)
    assert saved(tmp_path) == {"model-15.ckpt", "model-20.ckpt", "model-25.ckpt"}
    assert RunConfig().keep_checkpoint_max == 5  # TensorFlow's


def test_another_process_goes_on_where_the_directory_stands_bit_for_bit(inputs, tmp_path):
    whole = estimator(tmp_path / "whole").train(inputs, max_steps=33)
    estimator(tmp_path / "parts").train(inputs, max_steps=14)
    rest = estimator(tmp_path / "parts").train(inputs, max_steps=33)
    assert rest.global_step == 33
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(rest).items())


def test_without_a_number_of_steps_the_data_is_gone_through_once(inputs, tmp_path):
    classifier = estimator(tmp_path).train(inputs)
    assert classifier.global_step == 20
    assert classifier.train(inputs).global_step == 40


def test_a_pass_that_was_begun_is_ended(inputs, tmp_path):
    classifier = estimator(tmp_path).train(inputs, steps=13)
    assert classifier.train(inputs).global_step == 20


def test_predictions_come_row_by_row_or_in_batches(inputs, tmp_path):
    classifier = estimator(tmp_path).train(inputs, steps=20)
    data = lambda: [batch[0] for batch in inputs(shuffle=False)]  # noqa: E731
    rows = list(classifier.predict(data, predict_keys=["class"]))
    assert len(rows) == 1000
    assert rows[0].keys() == {"class"}
    batches = list(classifier.predict(data, yield_single_examples=False))
    assert len(batches) == 20
    assert torch.equal(torch.stack([row["class"] for row in rows]), torch.cat([batch["class"] for batch in batches]))


def test_a_fresh_process_evaluates_and_predicts_from_the_directory(inputs, tmp_path):
    trained = estimator(tmp_path).train(inputs, steps=20)
    expected = trained.evaluate(lambda: inputs(shuffle=False))
    fresh = estimator(tmp_path)
    assert fresh.evaluate(lambda: inputs(shuffle=False)) == expected
    assert next(fresh.predict(lambda: inputs(shuffle=False)))["logits"].shape == (10,)


def test_an_older_checkpoint_can_be_asked_for(inputs, tmp_path):
    classifier = estimator(tmp_path).train(inputs, steps=20)
    older = classifier.evaluate(inputs, checkpoint_path=tmp_path / "checkpoints/model-10.ckpt")
    assert older["global_step"] == 10


def test_training_begins_anew_also_after_another_checkpoint_was_evaluated(inputs, tmp_path):
    other = estimator(tmp_path / "other").train(inputs, steps=10).latest_checkpoint()
    looked, plain = estimator(tmp_path / "looked"), estimator(tmp_path / "plain")
    looked.evaluate(inputs, checkpoint_path=other)
    for classifier in (looked, plain):
        classifier.train(inputs, steps=5)
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(looked).items())


def test_train_and_evaluate_measures_at_every_checkpoint_and_goes_on_when_called_again(inputs, tmp_path):
    class Seen(fp.Callback):
        def __init__(self):
            self.at = []

        def on_validation_end(self, trainer, pl_module):
            self.at.append(trainer.global_step)

    seen = Seen()
    spec = EvalSpec(lambda: inputs(shuffle=False), steps=None)
    classifier = estimator(tmp_path)
    metrics = train_and_evaluate(classifier, TrainSpec(inputs, max_steps=30, hooks=(seen,)), spec)
    assert seen.at == [10, 20, 30]
    assert metrics == classifier.evaluate(lambda: inputs(shuffle=False))
    assert train_and_evaluate(estimator(tmp_path), TrainSpec(inputs, max_steps=40), spec)["global_step"] == 40
    assert train_and_evaluate(estimator(tmp_path), TrainSpec(inputs, max_steps=40), spec)["global_step"] == 40


class Told(Exporter):
    """A logger that writes nothing and keeps its input."""

    name = "told"

    def __init__(self):
        self.calls = []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.calls.append((export_path, checkpoint_path, eval_result, is_the_final_export))


def test_exporters_get_every_evaluated_checkpoint_and_training_goes_on_as_without_them(inputs, images, tmp_path):
    told, receiver = Told(), lambda: images.tensors[0][:4]
    exporters = [LatestExporter("latest", receiver, exports_to_keep=2), FinalExporter("final", receiver), told]
    data = lambda: inputs(shuffle=False)  # noqa: E731
    classifier, plain = estimator(tmp_path / "one"), estimator(tmp_path / "plain")
    metrics = train_and_evaluate(
        classifier, TrainSpec(inputs, max_steps=22), EvalSpec(data, steps=None, exporters=exporters)
    )
    train_and_evaluate(plain, TrainSpec(inputs, max_steps=22), EvalSpec(data, steps=None))
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(classifier).items())

    steps = [(path.name, result["global_step"], final) for _, path, result, final in told.calls]
    assert steps == [(f"model-{step}.ckpt", step, step == 22) for step in (10, 20, 22)]
    assert {path for path, *_ in told.calls} == {tmp_path / "one/export/told"}
    assert told.calls[1][2] == classifier.evaluate(data, checkpoint_path=tmp_path / "one/checkpoints/model-20.ckpt")
    assert told.calls[-1][2] == metrics

    files = {name: sorted((tmp_path / "one/export" / name).glob("*/model.pt2")) for name in ("latest", "final")}
    assert (len(files["latest"]), len(files["final"])) == (2, 1)
    rows = images.tensors[0][:50]
    before, last = (torch.export.load(path).module()(rows)["logits"] for path in files["latest"])
    expected = next(classifier.predict(lambda: [rows], yield_single_examples=False))["logits"]
    assert torch.equal(last, expected)
    assert torch.equal(torch.export.load(files["final"][0]).module()(rows)["logits"], expected)
    assert not torch.equal(before, last)


@pytest.mark.engine
@pytest.mark.slow
def test_checkpoints_may_lie_in_a_bucket_and_training_goes_on_from_there(inputs, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    for name, value in s3_settings(port).items():
        monkeypatch.setenv(name, value)
    spec = EvalSpec(inputs, steps=2, exporters=LatestExporter("latest", lambda: images.tensors[0][:4]))
    with serve_s3(port):
        make_bucket(port)
        train_and_evaluate(estimator("s3://lake/digits", every=4), TrainSpec(inputs, max_steps=4), spec)
        shutil.rmtree(tmp_path / "runs")
        again = estimator("s3://lake/digits", every=4)
        assert again.global_step == 4
        assert train_and_evaluate(again, TrainSpec(inputs, max_steps=6), spec)["global_step"] == 6
        begun = estimator(tmp_path / "local", warm_start_from="s3://lake/digits").train(inputs, steps=1)
    assert int(weights(begun)["parts.net.1.num_batches_tracked"]) == 7
    assert list((tmp_path / "runs/digits/export/latest").glob("*/model.pt2"))
    assert not (tmp_path / "runs/digits/checkpoints").exists()


@pytest.mark.slow
def test_exporters_are_called_in_one_of_several_processes(images, tmp_path):
    def input_fn():
        return DataLoader(images, 50)

    spec = EvalSpec(input_fn, steps=4, exporters=LatestExporter("latest", lambda: images.tensors[0][:4]))
    classifier = estimator(tmp_path, devices=2)
    metrics = train_and_evaluate(classifier, TrainSpec(input_fn, max_steps=15), spec)
    assert metrics["global_step"] == 15
    assert len(list((tmp_path / "export/latest").iterdir())) == 2


def wider_model_fn(features, labels, mode, params):
    """Like `model_fn`, with more classes, and the hidden layers under another name."""
    hidden, head = get_module("hidden", lambda: make_net()[:4]), get_module("head", lambda: nn.Linear(32, 20))
    logits = head(hidden(features))
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=logits)
    optimizer = lambda: torch.optim.SGD([*hidden.parameters(), *head.parameters()], lr=params["lr"])  # noqa: E731
    return EstimatorSpec(mode, loss=F.cross_entropy(logits, labels), train_op=optimizer)


def test_training_begins_with_the_weights_of_another_estimator(inputs, tmp_path):
    other = estimator(tmp_path / "other").train(inputs, steps=30)
    classifier = estimator(tmp_path / "one", warm_start_from=tmp_path / "other", log_every_n_steps=1)
    classifier.train(inputs, steps=1)
    assert classifier.global_step == 1
    near, far = (
        (weights(classifier)["parts.net.4.weight"] - weights(each)["parts.net.4.weight"]).abs().max()
        for each in (other, estimator(tmp_path / "fresh").train(inputs, steps=1))
    )
    assert near <= 0.011 < far  # a step of AdamW with lr=5e-3, against thirty
    again = estimator(tmp_path / "one", warm_start_from="nowhere").train(inputs, steps=1)
    assert again.global_step == 2  # its own checkpoint counts


def test_some_weights_may_be_taken_under_the_names_that_they_had(inputs, tmp_path):
    path = estimator(tmp_path / "other").train(inputs, steps=30).latest_checkpoint()
    names = {f"hidden.{place}": f"net.{place}" for place in ("0.weight", "0.bias", "1.weight", "1.bias")}
    names |= {f"hidden.1.{name}": f"net.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    settings = WarmStartSettings(path, ["hidden"], names)
    classifier = estimator(tmp_path / "one", wider_model_fn, warm_start_from=settings).train(inputs, steps=1)
    assert int(weights(classifier)["parts.hidden.1.num_batches_tracked"]) == 31
    assert weights(classifier)["parts.head.weight"].shape == (20, 32)


HEAD = {"head.weight": "net.4.weight", "head.bias": "net.4.bias"}


@pytest.mark.parametrize(
    ("chosen", "names", "error", "said"),
    [
        ("tail", {}, ConfigError, "no tensor whose name matches. There are: hidden.0.weight, "),
        (".*", {"hidden": "net"}, ConfigError, 'has no "hidden". There are: hidden.0.weight'),
        (".*", {}, CheckpointError, 'has no "hidden.0.weight". Leave "hidden.0.weight" out'),
        ("head", HEAD, CheckpointError, r"in the shape \(10, 32\), and model_fn makes it \(20, 32\)"),
    ],
)
def test_weights_that_cannot_be_taken_are_named(chosen, names, error, said, inputs, tmp_path):
    other = estimator(tmp_path / "other").train(inputs, steps=1)
    settings = WarmStartSettings(other.model_dir, chosen, names)
    with pytest.raises(error, match=said):
        estimator(tmp_path / "one", wider_model_fn, warm_start_from=settings).train(inputs, steps=1)


def test_a_checkpoint_of_other_params_is_told_by_its_shapes(inputs, tmp_path):
    def of_width(features, labels, params):
        net = get_module("net", lambda: nn.Linear(49, params["width"]))
        loss = F.cross_entropy(net(features), labels)
        return EstimatorSpec("any", loss=loss, train_op=lambda: torch.optim.SGD(net.parameters(), lr=0.1))

    config = RunConfig(trainer=QUIET)
    Estimator(of_width, tmp_path, config, {"width": 10}).train(inputs, steps=1)
    with pytest.raises(
        CheckpointError, match=r'"net.weight" in the shape \(10, 49\), and model_fn makes it \(12, 49\)'
    ):
        Estimator(of_width, tmp_path, config, {"width": 12}).evaluate(inputs)


def test_the_exported_file_predicts_without_the_model_fn(inputs, images, tmp_path):
    classifier = estimator(tmp_path).train(inputs, steps=10)
    path = classifier.export_saved_model(tmp_path / "export", lambda: images.tensors[0][:4])
    assert path.name == "model.pt2"
    served = torch.export.load(path).module()(images.tensors[0][:37])
    expected = torch.stack([row["class"] for row in classifier.predict(lambda: [images.tensors[0][:37]])])
    assert torch.equal(served["class"], expected)


def tpu_model_fn(features, labels, mode, params):
    net = get_module("net", make_net)
    logits = net(features)
    if mode == ModeKeys.PREDICT:
        return TPUEstimatorSpec(mode, predictions=logits)
    metrics = (lambda labels, logits: {"accuracy": (logits.argmax(1) == labels).float().mean()}, [labels, logits])
    optimizer = lambda: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    return TPUEstimatorSpec(mode, loss=F.cross_entropy(logits, labels), train_op=optimizer, eval_metrics=metrics)


@pytest.mark.slow
def test_a_tpu_estimator_makes_several_steps_in_a_call_and_hands_batch_sizes_to_input_fn(images, tmp_path):
    asked = []

    def input_fn(params):
        asked.append(params["batch_size"])
        return DataLoader(images, params["batch_size"], drop_last=True)

    class Calls(fp.Callback):
        def on_train_end(self, trainer, pl_module):
            self.steps = max(compilation.steps for compilation in trainer.step.compilations)

    calls = Calls()
    config = RunConfig(
        tf_random_seed=3,
        tpu_config=TPUConfig(iterations_per_loop=5, num_shards=2),
        trainer={**QUIET, "accelerator": "xla", "devices": 2},
    )
    classifier = TPUEstimator(
        tpu_model_fn, tmp_path, config, train_batch_size=40, eval_batch_size=100, predict_batch_size=20
    )
    classifier.train(input_fn, steps=50, hooks=[calls])
    metrics = classifier.evaluate(input_fn)
    assert calls.steps == 5
    assert metrics["global_step"] == 50
    assert metrics["accuracy"] > 0.6
    assert next(classifier.predict(input_fn)).shape == (10,)
    assert asked == [40, 40, 100, 100, 20, 20]


def test_a_tpu_estimators_batch_size_is_that_of_the_mode(inputs, tmp_path):
    asked = []

    def asking(features, labels, mode, params):
        asked.append((mode, params["batch_size"]))
        return model_fn(features, labels, mode, params)

    config = RunConfig(trainer=QUIET)
    classifier = TPUEstimator(
        asking, tmp_path, config, {"lr": 0.1}, use_tpu=False, train_batch_size=50, predict_batch_size=25
    )
    classifier.train(inputs, steps=1).evaluate(inputs, steps=1)
    next(classifier.predict(inputs))
    assert set(asked) == {("train", 50), ("eval", None), ("infer", 25)}
    with pytest.raises(ConfigError, match="the TPUEstimator has no eval_batch_size"):
        classifier.evaluate(lambda params: inputs())


def test_a_tpu_estimator_on_a_machine_without_a_tpu_says_so(inputs, tmp_path):
    with pytest.raises(ConfigError, match="no TPU is attached"):
        TPUEstimator(model_fn, tmp_path, params={"lr": 0.1}, train_batch_size=8).train(inputs, steps=1)


def test_what_cannot_be_is_refused_plainly(inputs, tmp_path):
    classifier = estimator(tmp_path)
    with pytest.raises(ConfigError, match="steps=1 and max_steps=2 are both given"):
        classifier.train(inputs, steps=1, max_steps=2)
    with pytest.raises(ConfigError, match="steps=0: expected 1 or more"):
        classifier.train(inputs, steps=0)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*: train first"):
        classifier.evaluate(inputs)
    with pytest.raises(ConfigError, match="can be iterated several times"):
        classifier.train(lambda: iter(inputs()), steps=1)
    with pytest.raises(ConfigError, match="returned no batch"):
        classifier.train(lambda: [], steps=1)
    with pytest.raises(ConfigError, match="sets it itself"):
        RunConfig(trainer={"max_steps": 3})
    with pytest.raises(ConfigError, match="sets it itself"):
        RunConfig(trainer={"limit_val_batches": 3})
    with pytest.raises(ConfigError, match="keep_checkpoint_max=-1"):
        RunConfig(keep_checkpoint_max=-1)
    with pytest.raises(ConfigError, match="expected a regular expression"):
        WarmStartSettings(tmp_path, "(")
    with pytest.raises(ConfigError, match="exports_to_keep=0"):
        LatestExporter("latest", list, exports_to_keep=0)
    with pytest.raises(ConfigError, match=r"the names are told, told\. Give each exporter its own"):
        train_and_evaluate(classifier, TrainSpec(inputs, 1), EvalSpec(inputs, exporters=[Told(), Told()]))
    with pytest.raises(ConfigError, match="the name of a directory"):
        FinalExporter("../final", list)
    with pytest.raises(ConfigError, match="outside a model_fn"):
        get_module("net", make_net)


OUTSIDE = nn.Linear(49, 10)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda loss, net: 3, "returned int: expected an EstimatorSpec"),
        (lambda loss, net: EstimatorSpec("train"), "without loss"),
        (lambda loss, net: EstimatorSpec("train", loss=loss), "needs train_op"),
        (lambda loss, net: EstimatorSpec("train", loss=loss, train_op=torch.optim.SGD(net.parameters())), "a new one"),
        (
            lambda loss, net: EstimatorSpec("train", loss=loss, train_op=lambda: torch.optim.SGD(OUTSIDE.parameters())),
            "of a module that get_module\\(\\) didn't make",
        ),
    ],
)
def test_a_model_fn_that_answers_wrongly_is_told_what_was_expected(answer, said, inputs, tmp_path):
    def wrong(features, labels, mode):
        net = get_module("net", lambda: nn.Linear(49, 10))
        return answer(F.cross_entropy(net(features), labels), net)

    with pytest.raises(ConfigError, match=said):
        estimator(tmp_path, wrong).train(inputs, steps=1)


def test_a_metric_called_like_one_that_there_is_anyway_is_refused(inputs, tmp_path):
    def doubling(features, labels, mode, params):
        return dataclasses.replace(model_fn(features, labels, mode, params), eval_metric_ops={"loss": 1.0})

    classifier = estimator(tmp_path, doubling).train(inputs, steps=1)
    with pytest.raises(ConfigError, match='can\'t be called "loss"'):
        classifier.evaluate(inputs)


def test_a_module_that_is_first_asked_for_in_the_middle_is_refused(inputs, tmp_path):
    calls = []

    def fickle(features, labels, mode, params):
        calls.append(mode)
        if len(calls) > 2:
            get_module("late", lambda: nn.Linear(1, 1))
        return model_fn(features, labels, mode, params)

    with pytest.raises(ConfigError, match=r'get_module\("late"\).*in every call'):
        estimator(tmp_path, fickle).train(inputs, steps=5)
