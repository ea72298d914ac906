"""Silent slowdowns of a compiled training, each reported once: pure functions, and real runs with XLA on the CPU."""

from __future__ import annotations

import time

import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import Classifier, dataset, loader
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp
from footplate.callbacks.pitfalls import Pitfalls
from footplate.hardware.tpu.pitfalls import (
    Product,
    full_precision,
    recompilations,
    small_products,
    tiny_batches,
    transfers,
    waiting,
)
from footplate.step.xla.capture import capture_training
from footplate.step.xla.capture.matrix_products import products_of
from footplate.step.xla.runtime.program_cache import Compilation

SIZES = st.integers(1, 1000)


def pitfalls_of(trainer) -> Pitfalls:
    (pitfalls,) = [callback for callback in trainer.callbacks if isinstance(callback, Pitfalls)]
    return pitfalls


class Uneven(torch.utils.data.Dataset):
    """Rows of three lengths, like sequences."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.ones(4 + index // 8, 8), torch.tensor(1)


class Sequences(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]).mean(1), batch[1])


def test_recompilations_are_counted_with_the_form_that_caused_each(make_trainer, caplog):
    trainer = make_trainer(accelerator="xla", max_epochs=2)
    trainer.fit(Sequences(), DataLoader(Uneven(), 8))
    (said,) = [text for text in pitfalls_of(trainer).told if "compiled" in text]
    assert "Sequences.training_step was compiled 3 times" in said
    assert all(f"float32[8, {length}, 8], int64[8]" in said for length in (4, 5, 6))
    assert "drop_last=True" in said
    assert [record.levelname for record in caplog.records if record.message == said] == ["WARNING"]


def test_one_form_and_a_last_batch_are_not_spoken_of():
    made = [Compilation("M.training_step", form, 1, 2.0) for form in ("float32[8]", "float32[3]")]
    assert recompilations(made) == []
    assert recompilations([*made, Compilation("M.validation_step", "float32[8]", 1, 1.0)]) == []
    assert recompilations([*made, *made]) == []  # compiled again for another reason


class Slow(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = dataset(40)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.02)
        return self.rows[index]


class Patient(Classifier):
    def configure_callbacks(self):
        return [Pitfalls("cpu", least_s=0.0)]


def test_waiting_for_input_is_told_once(make_trainer):
    trainer = make_trainer(accelerator="xla", log_every_n_steps=2, max_epochs=2)
    trainer.fit(Patient(), DataLoader(Slow(), 4))
    (said,) = pitfalls_of(trainer).told
    assert "waited for input for" in said


def test_a_share_of_waiting_is_spoken_of_from_a_fifth():
    assert waiting(1.9, 10.0) is None
    assert "for 20% of 10 s" in waiting(2.0, 10.0)
    assert waiting(0.0, 0.0) is None


class Looks(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


def test_a_hook_that_fetches_the_weights_at_every_batch_is_told(make_trainer):
    trainer = make_trainer(accelerator="xla", max_epochs=1)
    trainer.fit(Looks(), loader(20))
    assert any("Looks may read the weights at every batch" in text for text in pitfalls_of(trainer).told)


def test_a_plain_training_is_told_nothing(make_trainer):
    trainer = make_trainer(accelerator="xla", max_epochs=1)
    trainer.fit(Classifier(), loader(40), loader(20, shuffle=False))
    assert pitfalls_of(trainer).told == []


class AsOnTPU(Classifier):
    def configure_callbacks(self):
        return [Pitfalls("tpu")]


def test_on_a_tpu_precision_rows_and_sizes_are_told_in_a_run(make_trainer, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
    trainer = make_trainer(accelerator="xla", devices=4, log_every_n_steps=1, max_epochs=1)
    trainer.fit(AsOnTPU(), loader(24, 12))
    told = pitfalls_of(trainer).told
    assert sum('Use precision="bf16-mixed"' in text for text in told) == 1
    assert sum("Batches of 12 rows give each of 4 device(s) 3" in text for text in told) == 1
    assert sum("multiply 128 × 128 at once" in text for text in told) == 1
    assert sum("log_every_n_steps=1 waits" in text for text in told) == 1
    assert sum("A v5e-1 has 1 device(s) on each of its hosts, but JAX finds" in text for text in told) == 1


def test_bfloat16_is_not_spoken_of():
    assert full_precision("bf16-mixed") is None
    assert full_precision("bf16-true") is None
    assert "six products for one" in full_precision("32-true")


def test_eight_rows_for_each_device_are_enough():
    assert tiny_batches(64, 8) is None
    assert "give each of 8 device(s) 7.875" in tiny_batches(63, 8)


def test_reading_metrics_now_and_then_is_not_spoken_of():
    assert transfers([], 10**6, 50) is None
    assert transfers([], 10**6, 1) is not None


@given(SIZES, SIZES, SIZES, st.sampled_from([128, 256]))
def test_a_product_is_filled_up_to_whole_units(rows, inner, columns, unit):
    product = Product(rows, inner, columns, times=3)
    done = product.done(unit)
    assert done >= product.multiplications
    assert done % (3 * 8 * unit * unit) == 0
    assert done < 3 * (rows + 8) * (inner + unit) * (columns + unit)


def test_sizes_that_fill_the_units_are_not_spoken_of():
    assert small_products([Product(64, 128, 256), Product(8, 1024, 128)], 128) is None
    assert small_products([], 128) is None


def test_the_worst_product_is_named():
    said = small_products([Product(64, 128, 128), Product(4096, 64, 10)], 128)
    assert "The worst is 4096×64 · 64×10" in said
    assert "Multiples of 128" in said


class Convolutional(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 5 * 5, 7))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_products_of_a_step_are_its_layers_forth_and_back():
    module = Convolutional()
    batch = (torch.ones(4, 3, 5, 5), torch.zeros(4, dtype=torch.int64))
    captured = capture_training(module, module.configure_optimizers(), batch)
    products = sorted(map(str, products_of(captured.graph)))
    convolution = ["100×27 · 27×6", "27×100 · 100×6"]  # the input of the first layer needs no gradient
    linear = ["4×150 · 150×7", "4×7 · 7×150", "7×4 · 4×150"]
    assert products == sorted(convolution + linear)


def test_the_products_of_a_batch_of_matrices_are_counted_each():
    graph = torch.fx.experimental.proxy_tensor.make_fx(torch.bmm, tracing_mode="fake")(
        torch.ones(5, 2, 3), torch.ones(5, 3, 4)
    )
    (product,) = products_of(graph)
    assert product == Product(2, 3, 4, times=5)
    assert product.multiplications == 120


def test_eager_training_is_not_watched(make_trainer):
    trainer = make_trainer(accelerator="cpu", max_epochs=1)
    trainer.fit(Classifier(), loader(20))
    assert not any(isinstance(callback, Pitfalls) for callback in trainer.callbacks)
