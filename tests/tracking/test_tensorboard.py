"""TensorBoard, read back through its own event reader."""

import threading

import pytest

from footplate.tracking import TensorBoard


def read(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def points(events, name):
    return [(point.step, point.value) for point in events.Scalars(name)]


def logged(run_dir, losses, state=None):
    logger = TensorBoard()
    if state:
        logger.load_state_dict(state)
    logger.setup(run_dir, {"model": {"lr": 0.5}, "act": "relu", "sizes": [1, 2]})
    for step, loss in losses:
        logger.log_metrics({"loss": loss}, step, 0)
    return logger


def test_scalars_and_hyper_parameters_are_read_back(run_dir):
    logged(run_dir, [(10, 0.5), (20, 0.25)]).finalize("success")
    events = read(run_dir / "tensorboard")
    assert points(events, "loss") == [(10, 0.5), (20, 0.25)]
    assert points(events, "epoch") == [(10, 0), (20, 0)]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"model/lr" in content
    assert b"relu" in content


def test_a_resumed_curve_forgets_what_came_after_the_checkpoint(run_dir):
    first = logged(run_dir, [(1, 1.0), (2, 2.0)])
    state = first.state_dict()
    for step in (3, 4):
        first.log_metrics({"loss": 99.0}, step, 0)
    first.finalize("interrupted")
    logged(run_dir, [(3, 3.0), (4, 4.0)], state).finalize("success")
    assert points(read(run_dir / "tensorboard"), "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


@pytest.mark.slow
def test_the_curve_is_right_whatever_number_the_files_of_a_second_get(run_dir):
    """The numbers of files in a process count up: at some point, .10 follows .9."""
    logger, steps = None, range(1, 12)
    for step in steps:
        logger = logged(run_dir, [(step, float(step))], logger and logger.state_dict())
        logger.finalize("interrupted")
    assert points(read(run_dir / "tensorboard"), "loss") == [(step, float(step)) for step in steps]


def test_a_new_run_moves_older_files_aside(run_dir):
    for loss in (1.0, 2.0):
        logged(run_dir, [(0, loss)]).finalize("success")
    assert points(read(run_dir / "tensorboard-1"), "loss") == [(0, 1.0)]
    assert points(read(run_dir / "tensorboard"), "loss") == [(0, 2.0)]


def test_later_runs_and_results_hide_nothing_of_a_longer_first_run(run_dir):
    logger = logged(run_dir, [(1, 1.0), (2, 2.0), (3, 3.0)])
    logger.finalize("success")
    for _ in range(2):
        logger.setup(run_dir, {})
        logger.log_metrics({"again": 1.0}, 1, 0)
        logger.finalize("success")
    other = TensorBoard()
    other.append(run_dir, {})
    other.log_metrics({"test_loss": 0.5}, 0, 0)
    other.finalize("success")
    events = read(run_dir / "tensorboard")
    assert points(events, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert points(events, "again") == [(1, 1.0), (1, 1.0)]
    assert points(events, "test_loss") == [(0, 0.5)]


def test_tensorboard_is_touched_only_in_a_thread_of_the_loggers_own(run_dir, monkeypatch):
    from torch.utils import tensorboard

    threads = set()

    class Recording(tensorboard.SummaryWriter):
        def add_scalar(self, *args, **kwargs):
            threads.add(threading.current_thread().name)
            super().add_scalar(*args, **kwargs)

    monkeypatch.setattr(tensorboard, "SummaryWriter", Recording)
    logged(run_dir, [(0, 1.0)]).finalize("success")
    assert threads == {"footplate-tensorboard"}
