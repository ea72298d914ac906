"""A step that runs out of memory says what the memory held, and which batch would fit."""

from __future__ import annotations

import pytest
import torch
from models.small import Classifier, loader
from torch import nn

import footplate as fp
from footplate.training.out_of_memory import GIB, Held, advice

FULL = Held("cuda:0", 1 * GIB, 1 * GIB, 2 * GIB, GIB // 2, 512, 78 * GIB, 80 * GIB)


def test_the_parts_of_a_full_memory_are_listed():
    assert FULL.lines() == [
        "cuda:0 has 80.0 GiB for this process. It held at most:",
        "     1.0 GiB  parameters and buffers",
        "     1.0 GiB  gradients",
        "     2.0 GiB  the optimizer's state",
        "     0.5 GiB  the batch (512 rows)",
        "    73.5 GiB  the rest: mostly activations, which grow with the batch",
    ]


def test_the_batch_that_fits_is_given_with_the_accumulation_that_keeps_the_rows_of_a_step():
    assert advice(FULL, 2, 140 * GIB, 136 * GIB) == [
        "A step of 512 rows needs about 140.0 GiB, by an estimate from its operations. About 256 rows fit.",
        "Use batch_size=256 with accumulate_grad_batches=4: as many rows make an optimizer step.",
    ]


@pytest.mark.parametrize(
    ("size", "growing", "words"),
    [(70, 66, "That would fit: other tensors hold the memory"), (200, 10, "Not even one row fits.")],
)
def test_other_cases_have_other_words(size, growing, words):
    (line,) = advice(FULL, 1, size * GIB, growing * GIB)
    assert words in line


class Full(Classifier):
    """Has no memory for more than 8 rows."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) > 8 and not torch.compiler.is_compiling():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def test_the_error_of_a_training_has_a_note_with_an_estimate(make_trainer):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        make_trainer().fit(Full(), loader())
    (note,) = raised.value.__notes__
    assert note.splitlines()[0] == "cpu held:"
    assert "GiB  the batch (10 rows)" in note
    assert "A step of 10 rows needs about 0.0 GiB" in note


def test_what_grows_with_the_batch_is_told_from_what_does_not(make_trainer):
    rows, width = 4096, 256
    estimates = []

    class Looks(fp.Callback):
        def on_exception(self, trainer, pl_module, exception):
            from footplate.training.out_of_memory import estimate

            estimates.append(estimate(trainer.run))

    class Wide(Full):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
            )

    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(callbacks=[Looks()]).fit(Wide(), loader(rows, rows))
    ((size, growing),) = estimates
    activations, weights = rows * width * 4, width * width * 4
    assert 2 * activations < growing < 5 * activations
    assert 3 * weights < size - growing < 6 * weights


def test_a_step_that_cannot_be_captured_has_no_estimate(make_trainer):
    class Asks(Full):
        def training_step(self, batch, batch_idx):
            if float(batch[0].sum()) > 1e9:
                return None
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        make_trainer().fit(Asks(), loader())
    (note,) = raised.value.__notes__
    assert "the batch (10 rows)" in note
    assert "estimate" not in note


def test_any_other_error_has_no_note(make_trainer):
    class Broken(Classifier):
        def training_step(self, batch, batch_idx):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        make_trainer().fit(Broken(), loader())
    assert not hasattr(raised.value, "__notes__")
