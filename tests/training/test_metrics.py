"""Values collected by `self.log`: none is read before it is needed, and each is right however it is read."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import Classifier, loader
from torch import nn

import footplate as fp
from footplate.training.evaluation import counting_nothing
from footplate.training.metrics import READ_AFTER, MetricLog, to_floats

values = st.floats(-1e6, 1e6, width=32)
logged = st.lists(st.tuples(values, st.integers(1, 512)), min_size=1, max_size=40)
NUMPY = {"sum": np.sum, "min": np.min, "max": np.max}


def log_of(by_step: bool = False) -> MetricLog:
    return MetricLog(nn.Module(), by_step=by_step)


def collect(pairs, reads: set[int], **options) -> MetricLog:
    """Log (value, weight) pairs by step and by epoch, reading after some of them."""
    log = log_of()
    for index, (value, weight) in enumerate(pairs):
        log.log("x", torch.tensor(value), batch_size=weight, on_step=True, on_epoch=True, **options)
        if index in reads:
            assert log.step_values().logger == {"x_step": value}
            log.state_dict()  # a checkpoint reads what waits
    return log


@given(logged, st.sets(st.integers(0, 39)))
def test_the_weighted_mean_is_numpys_for_any_split_into_reads(pairs, reads):
    mean = collect(pairs, reads).epoch_values().logger["x_epoch"]
    numbers, weights = zip(*pairs, strict=True)
    assert mean == pytest.approx(np.average(np.float64(numbers), weights=weights), rel=1e-12, abs=1e-9)


@given(logged, st.sets(st.integers(0, 39)))
def test_the_mean_does_not_depend_on_when_it_was_read_by_a_single_bit(pairs, reads):
    assert collect(pairs, reads).epoch_values() == collect(pairs, set()).epoch_values()


@given(logged, st.sets(st.integers(0, 39)), st.sampled_from(sorted(NUMPY)))
def test_sums_and_extremes_are_numpys(pairs, reads, name):
    reduced = collect(pairs, reads, reduce_fx=name).epoch_values().logger["x_epoch"]
    assert reduced == pytest.approx(NUMPY[name]([value for value, _ in pairs]), rel=1e-9, abs=1e-6)


@given(st.permutations([1.0, 2.0, math.nan, -1.0]), st.sampled_from(["mean", *sorted(NUMPY)]))
def test_a_nan_is_never_lost_wherever_it_comes(numbers, name):
    log = log_of()
    for number in numbers:
        log.log("x", number, reduce_fx=name)
    assert math.isnan(log.epoch_values().logger["x"])


def test_a_function_reduces_all_values_of_the_epoch():
    log = log_of()
    for number in (1.0, 5.0, 3.0):
        log.log("x", number, reduce_fx=torch.median)
    assert log.epoch_values().logger == {"x": 3.0}


def test_torchs_own_reductions_are_known_by_their_function():
    log = log_of()
    for number in (1.0, 5.0):
        log.log("x", number, reduce_fx=torch.max)
    assert log.epoch_values().logger == {"x": 5.0}


def test_the_weight_is_the_first_dimension_of_the_batch():
    log = log_of()
    for rows, value in ((3, 1.0), (1, 5.0)):
        log.batch = {"image": torch.zeros(rows, 2), "label": torch.zeros(rows)}
        log.log("x", value)
    assert log.epoch_values().logger == {"x": 2.0}


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.zeros(4), torch.zeros(9)), 4),
        ({"text": ["a", "b"], "x": torch.zeros(2)}, 2),
        (torch.tensor(1.0), 1),
        (object(), 1),
        ([], 1),
    ],
)
def test_weights_of_batches_of_any_form(batch, rows):
    log = log_of()
    log.batch = batch
    log.log("x", 1.0)
    log.batch = torch.zeros(4)
    log.log("x", 0.0)
    assert log.epoch_values().logger["x"] == pytest.approx(rows / (rows + 4))


def test_names_by_step_by_epoch_and_by_both():
    log = log_of(by_step=True)
    log.log("default", 1.0)
    log.log("epoch", 2.0, on_step=False, on_epoch=True)
    log.log("both", 3.0, on_step=True, on_epoch=True)
    log.log("neither", 4.0, on_step=False, on_epoch=False)
    step, epoch = log.step_values(), log.epoch_values()
    assert step.logger == {"default": 1.0, "both_step": 3.0}
    assert epoch.logger == {"epoch": 2.0, "both_epoch": 3.0}
    assert step.callback["both"] == epoch.callback["both"] == 3.0


def test_a_value_may_be_kept_from_the_loggers_and_shown_in_the_bar():
    log = log_of()
    log.log("x", 1.0, logger=False, prog_bar=True)
    of_epoch = log.epoch_values()
    assert of_epoch.logger == {}
    assert of_epoch.callback == of_epoch.progress == {"x": 1.0}


def test_an_epoch_begins_anew():
    log = log_of()
    log.log("x", 1.0)
    log.epoch_values()
    assert log.epoch_values().logger == {}
    log.log("x", 3.0)
    assert log.epoch_values().logger == {"x": 3.0}


def test_a_tensor_that_is_changed_in_place_afterwards_was_logged_as_it_was():
    log = log_of()
    running = torch.zeros(())
    for _ in range(3):
        running += 1
        log.log("x", running)
    assert log.epoch_values().logger == {"x": 2.0}


def test_a_logged_loss_does_not_keep_its_graph():
    log = log_of()
    weight = torch.ones(3, requires_grad=True)
    alive = weakref.ref(weight)  # which the graph holds
    log.log("x", (weight * 2).sum())
    del weight
    assert alive() is None


def test_waiting_values_are_read_before_they_are_many():
    log = log_of()
    for _ in range(READ_AFTER + 1):
        log.log("x", torch.tensor(1.0))
    assert len(log._entries["x"].waiting) == 1
    assert log.epoch_values().logger == {"x": 1.0}


@pytest.mark.parametrize("cut", range(4))  # a function comes back with the first value that is logged again
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max", torch.median])
def test_a_restored_epoch_ends_with_the_very_same_value(cut, reduce_fx):
    numbers = [0.1, 0.7, 0.3, 1e-9]

    def run(log: MetricLog, some: list[float]) -> MetricLog:
        for number in some:
            log.log("x", torch.tensor(number), reduce_fx=reduce_fx, batch_size=3)
        return log

    restored = log_of()
    restored.load_state_dict(run(log_of(), numbers[:cut]).state_dict())
    assert run(restored, numbers[cut:]).epoch_values() == run(log_of(), numbers).epoch_values()


def test_a_torchmetrics_object_is_reduced_by_itself_and_once_an_epoch():
    import torchmetrics

    class Counted(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

        def validation_step(self, batch, batch_idx):
            self.accuracy.update(self(batch[0]), batch[1])
            self.log("val_acc", self.accuracy)

    model, data = Counted(), loader(40, shuffle=False)
    results = fp.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False).validate(model, data)
    with torch.no_grad():
        right = [(model.eval()(x).argmax(1) == y).float().mean().item() for x, y in data]
    assert results[0]["val_acc"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "expected a number"),
        (None, "expected a number"),
        (torch.zeros(3), r"shape \(3,\) is not one number"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value, message):
    with pytest.raises(fp.ConfigError, match=rf'self.log\("acc".*{message}'):
        log_of().log("acc", value)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(fp.ConfigError, match=r'reduce_fx="average".*mean, sum, min, max'):
        log_of().log("acc", 1.0, reduce_fx="average")


@pytest.mark.parametrize(("name", "value"), [("avg", 1.5), ("SUM", 3.0), ("Max", 2.0)])
def test_reductions_have_lightnings_names_too(name, value):
    log = log_of()
    for number in (1.0, 2.0):
        log.log("x", number, reduce_fx=name)
    assert log.epoch_values().logger["x"] == value


def test_numbers_of_all_kinds_become_floats_in_their_order():
    mixed = [1, torch.tensor(2), torch.tensor([3.0]), np.float32(4), torch.tensor(5.0, dtype=torch.bfloat16), True]
    assert to_floats(mixed) == [1.0, 2.0, 3.0, 4.0, 5.0, 1.0]


def test_a_dict_is_logged_item_by_item():
    log = log_of()
    log.log("loss", {"box": 1.0, "class": torch.tensor(2.0)})
    assert log.epoch_values().logger == {"loss.box": 1.0, "loss.class": 2.0}


def test_a_dict_of_several_loaders_ends_with_the_loaders_index():
    log = log_of()
    log.dataloader_idx = 1
    log.log("loss", {"box": 1.0})
    assert log.epoch_values().logger == {"loss.box/dataloader_idx_1": 1.0}


CHANGES = {
    "a loss": lambda: (torch.ones(3, requires_grad=True) * 2).sum(),
    "a leaf": lambda: torch.tensor(6.0),
    "an array": lambda: np.array(6.0),
    "a subclass": lambda: torch.tensor(6.0).as_subclass(type("Own", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_is_logged_as_it_was_whatever_its_owner_does_to_it_later(name):
    log, value = log_of(by_step=True), CHANGES[name]()
    log.log("x", value, on_step=True, on_epoch=True)
    value += 100
    assert log.step_values().logger == {"x_step": 6.0}
    assert log.epoch_values().logger == {"x_epoch": 6.0}


def test_a_regulariser_added_in_place_is_not_in_the_logged_loss(make_trainer):
    class Adds(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss += 1000.0
            return loss

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Adds(), loader())
    assert trainer.callback_metrics["train_loss_epoch"] < 1000


operations = st.lists(
    st.tuples(
        st.sampled_from(["log", "add", "multiply", "fill", "read"]), st.integers(0, 2), st.floats(-8, 8, width=32)
    ),
    min_size=1,
    max_size=40,
)


@given(operations, st.sampled_from(["mean", "sum", "min", "max"]))
def test_values_changed_in_place_between_any_calls_give_the_plain_reduction(operations, reduce_fx):
    log, seen = log_of(), []
    kept = [torch.ones(()), torch.ones((), requires_grad=True) * 2, torch.ones(1)]
    for name, which, number in operations:
        value = kept[which]
        with torch.no_grad():
            if name == "log":
                log.log("x", value, reduce_fx=reduce_fx)
                seen.append(value.item())
            elif name == "read":
                log.state_dict()
            else:
                {"add": value.add_, "multiply": value.mul_, "fill": value.fill_}[name](number)
    result = log.epoch_values().logger
    expected = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}[reduce_fx]
    assert result == ({"x": pytest.approx(expected(seen))} if seen else {})


def test_a_metrics_list_survives_the_reset_that_follows_its_state():
    from torchmetrics import CatMetric

    metric = CatMetric()
    module = nn.Module()
    module.seen = metric
    log = MetricLog(module, by_step=False)
    log.log("x", metric)
    metric.update(torch.tensor([1.0, 2.0]))
    state = log.state_dict()
    metric.reset()
    log.load_state_dict(state)
    assert torch.cat(metric.value).tolist() == [1.0, 2.0]


def test_a_batch_that_counts_nothing_leaves_a_metric_that_is_updated_in_place():
    from torchmetrics import SumMetric

    module = nn.Module()
    module.total = SumMetric()
    module.total.update(torch.tensor(1.0))
    with counting_nothing(module, log_of()):
        module.total.sum_value += 5.0  # in place, as metrics do
    assert module.total.sum_value == 1.0


def test_epoch_end_hooks_compute_a_logged_torchmetrics_object_before_it_is_reset(make_trainer):
    from torchmetrics import SumMetric

    seen: list[tuple[str, float]] = []

    class Judged(Classifier):
        def __init__(self):
            super().__init__()
            self.trained, self.validated = SumMetric(), SumMetric()

        def training_step(self, batch, batch_idx):
            self.trained.update(1.0)
            self.log("trained", self.trained, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.validated.update(1.0)
            self.log("validated", self.validated)

        def on_train_epoch_end(self):
            seen.append(("train", float(self.trained.compute())))

        def on_validation_epoch_end(self):
            seen.append(("validate", float(self.validated.compute())))
            self.log("twice", 2 * self.validated.compute())

    run = make_trainer(max_epochs=2, limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=0)
    run.fit(Judged(), loader(), loader())
    assert seen == [("validate", 2.0), ("train", 3.0)] * 2
    assert {name: float(run.callback_metrics[name]) for name in ("trained", "validated", "twice")} == {
        "trained": 3.0, "validated": 2.0, "twice": 4.0,
    }  # fmt: skip


def test_a_value_that_on_train_start_logs_belongs_to_the_first_epoch(make_trainer):
    sent = []

    class Starts(Classifier):
        def on_train_start(self):
            self.log("at_start", 1.0)

    class Keeps(fp.Logger):
        def log_metrics(self, metrics, step, epoch):
            sent.extend((step, name) for name in metrics if name == "at_start")

    run = make_trainer(max_epochs=2, limit_train_batches=3, log_every_n_steps=1, logger=Keeps())
    run.fit(Starts(), loader())
    assert sent == [(3, "at_start")]


class Collects(Classifier):
    """Updates torchmetrics objects in each step, and computes and resets them itself at the end of the epoch."""

    def __init__(self):
        from torchmetrics import CatMetric, MetricCollection
        from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

        super().__init__()
        kinds = {"precision": MulticlassPrecision(3), "recall": MulticlassRecall(3)}  # they share their states
        self.scores, self.seen = MetricCollection(kinds), CatMetric()
        self.found = []

    def training_step(self, batch, batch_idx):
        self.scores.update(batch[0][:, :3].softmax(1), batch[1])
        self.seen.update(batch[0][:, 0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        scores = {name: float(value) for name, value in self.scores.compute().items()}
        self.found.append((*scores.values(), self.seen.compute().tolist()))
        self.log_dict(scores)
        self.scores.reset()
        self.seen.reset()


@pytest.mark.parametrize("stops", ["max_steps", "exception"])
def test_what_a_module_collects_without_logging_it_is_resumed(make_trainer, stops):
    whole = Collects()
    make_trainer(max_epochs=2).fit(whole, loader())

    first = Collects()
    if stops == "max_steps":
        make_trainer(max_epochs=2, max_steps=17).fit(first, loader())
        assert first.scores["recall"].tp.sum() == 0  # as its hook has left it
    else:
        first.on_train_batch_start = lambda batch, batch_idx: 1 / (17 - first.global_step)
        with pytest.raises(ZeroDivisionError):
            make_trainer(max_epochs=2).fit(first, loader())
    resumed = Collects()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(resumed, loader(), ckpt_path="last")
    assert resumed.found == whole.found[1:]
    assert {"precision", "recall"} <= trainer.callback_metrics.keys()


class LogsScores(Collects):
    """Logs its collection, whose members share their states, as a whole."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.found.append({name: float(value) for name, value in self.scores.compute().items()})


def test_a_logged_collection_is_not_copied_at_each_step_and_is_resumed(make_trainer):
    whole, stopped, resumed = LogsScores(), LogsScores(), LogsScores()
    make_trainer(max_epochs=2, callbacks=[watch := Shares()]).fit(whole, loader())
    assert watch.shared == {True}
    make_trainer(max_epochs=2, max_steps=17).fit(stopped, loader())
    trainer = make_trainer(max_epochs=2)
    trainer.fit(resumed, loader(), ckpt_path="last")
    assert resumed.found == whole.found[1:]
    assert {name: float(trainer.callback_metrics[name]) for name in ("precision", "recall")} == whole.found[1]


class LogsByStep(Collects):
    """Logs a metric by step alone, and computes the epoch's value itself."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("precision", self.scores["precision"], on_step=True, on_epoch=False)
        return loss

    def on_train_epoch_end(self):
        self.found.append(int(self.scores["precision"].update_count))


def test_a_metric_that_is_logged_by_step_alone_starts_again_with_each_epoch_as_in_lightning(make_trainer):
    model = LogsByStep()
    make_trainer(max_epochs=3).fit(model, loader())
    assert model.found[0] > 1
    assert len(set(model.found)) == 1


class Shares(fp.Callback):
    """Records whether the members of a collection hold the same tensors after each step."""

    def __init__(self):
        self.shared = set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        precision, recall = (pl_module.scores._modules[name] for name in ("precision", "recall"))
        self.shared.add(precision.tp is recall.tp)


def test_ranks_that_collected_apart_are_continued_by_one():
    from footplate.checkpoint.metric_states import restore, states_of
    from footplate.distributed.resharing import part_of
    from footplate.distributed.world import World

    ranks = [Collects(), Collects()]
    whole = Collects()
    for rank, module in enumerate(ranks):
        for batch in list(loader(40, shuffle=False))[rank::2]:
            module.training_step(batch, 0)
            whole.training_step(batch, 0)
    parts = [
        {"step": {}, "metrics": {}, "loader": {}, "rng": {}, "torchmetrics": states_of(of_rank)} for of_rank in ranks
    ]
    state = {**parts[0], "seed": 1, "progress": {"batches": 2}, "ranks": parts}
    single = Collects()
    taken = part_of(state, World(0, 1), lambda path: single.get_submodule(path)._reductions)
    restore(single, taken["torchmetrics"])
    assert single.scores.compute() == whole.scores.compute()
    assert sorted(single.seen.compute().tolist()) == sorted(whole.seen.compute().tolist())
