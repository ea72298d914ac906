"""Whole steps as CUDA graphs. The cases of `tests/step/test_step_graph.py`, on a GPU, and what only a GPU can show."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from models.small import Classifier, loader
from step.test_step_graph import (  # noqa: F401  collected here, too
    Logs,
    alike,
    test_a_batch_that_the_module_keeps_is_not_overwritten,
    test_a_hook_of_the_optimizer_is_called_from_its_registration_on,
    test_a_resumed_run_goes_on_bit_for_bit,
    test_a_smaller_batch_runs_eagerly_in_between,
    test_a_step_has_a_graph_for_each_way_that_it_takes,
    test_a_step_that_a_graph_would_do_wrong_is_none,
    test_a_tensor_that_is_another_one_each_time_is_not_replayed,
    test_after_three_steps_each_step_is_a_replay,
    test_an_attribute_that_changes_ends_a_graph,
    test_another_batch_size_has_a_graph_of_its_own,
    test_batch_norm_counts_in_a_replay,
    test_gradients_are_those_of_the_latest_step,
    test_what_a_callback_changes_is_seen,
    train,
)

import footplate as fp
from footplate import checkpoint
from footplate.step import compiled_step
from footplate.training import monitor


class Counted:
    """The graphs that were captured, and their replays."""

    captured = 0
    replays = 0


@pytest.fixture
def graphs(monkeypatch):
    """Trace only, and count."""
    counted = Counted()
    end, replay = torch.cuda.CUDAGraph.capture_end, torch.cuda.CUDAGraph.replay

    def counted_end(self):
        end(self)
        counted.captured += 1

    def counted_replay(self):
        replay(self)
        counted.replays += 1

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", counted_end)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted_replay)
    monkeypatch.setitem(compiled_step.BACKENDS, "step", "eager")
    return counted


OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in ("Adam", "AdamW", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "Rprop")
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_that_counts_on_the_gpu_is_replayed(make_trainer, graphs, name):
    alike(make_trainer, graphs, lambda: Logs(OPTIMIZERS[name]), rtol=1e-2)
    assert graphs.replays == 33


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_fused_optimizer_makes_the_same_bits_as_in_the_eager_step(make_trainer, graphs, name):
    def module():
        return Logs(lambda parameters, lr: OPTIMIZERS[name](parameters, lr=lr, fused=True))

    eager, _, _ = train(make_trainer, module)
    found, _, _ = train(make_trainer, module, compile="cudagraphs")
    torch.testing.assert_close(found, eager, rtol=0.0, atol=0.0)
    assert graphs.replays == 33


def test_an_optimizer_that_reads_its_count_is_not(make_trainer, graphs, caplog):
    alike(make_trainer, graphs, lambda: Logs(torch.optim.Adafactor), rtol=1e-2)
    assert graphs.replays == 0
    assert "the step of Adafactor is not one program on the GPU" in caplog.text


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["step", "cudagraphs"])
def test_in_a_precision_of_16_bits(make_trainer, monkeypatch, graphs, precision, name):
    monkeypatch.setitem(compiled_step.BACKENDS, "step", "inductor")
    eager, _, _ = train(make_trainer, lambda: Plain(torch.optim.SGD), precision=precision)
    found, _, _ = train(make_trainer, lambda: Plain(torch.optim.SGD), precision=precision, compile=name)
    torch.testing.assert_close(found, eager, rtol=0.05, atol=0.02)
    assert (graphs.captured, graphs.replays) == (1, 33)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("fused", [False, True])
def test_compiled_for_real(make_trainer, monkeypatch, graphs, fused, clip):
    monkeypatch.setitem(compiled_step.BACKENDS, "step", "inductor")

    def module():
        return Plain(lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=fused))

    alike(make_trainer, graphs, module, rtol=1e-3, gradient_clip_val=clip)
    assert (graphs.captured, graphs.replays) == (1, 33)


class Plain(Logs):
    """Without dropout: Inductor draws other numbers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))


def test_dropout_draws_what_the_eager_step_draws(make_trainer, graphs):
    """The same seed before each step, and the same kernels."""
    alike(make_trainer, graphs, lambda: Logs(torch.optim.SGD), rtol=1e-5)


@pytest.mark.parametrize("then", ["cpu", "cuda"])
def test_a_checkpoint_goes_on_without_graphs(make_trainer, graphs, then):
    saver = fp.ModelCheckpoint(every_n_train_steps=8)
    trainer = make_trainer(max_epochs=1, compile="cudagraphs", callbacks=[saver])
    trainer.fit(Logs(), loader())
    state = checkpoint.load(saver.last_model_path)
    group = state["optimizer_states"][0]["param_groups"][0]
    assert (group["capturable"], type(group["lr"])) == (False, float)
    again = make_trainer(accelerator=then, max_epochs=2)
    again.fit(Logs(), loader(), ckpt_path="last")
    assert again.global_step == 24


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_a_checkpoint_without_graphs_goes_on_with_them(make_trainer, graphs, first):
    saver = fp.ModelCheckpoint(every_n_train_steps=8)
    make_trainer(accelerator=first, max_epochs=1, callbacks=[saver]).fit(Logs(), loader())
    make_trainer(max_epochs=2, compile="cudagraphs").fit(Logs(), loader(), ckpt_path="last")
    assert graphs.replays == 9


def test_float16_is_refused(make_trainer):
    with pytest.raises(fp.ConfigError, match="scales the loss"):
        make_trainer(compile="step", precision="16-mixed").fit(Classifier(), loader())


def test_what_cannot_be_captured_is_trained_without_a_graph(make_trainer, graphs, caplog):
    """The number of results of `nonzero` is known on the GPU alone."""

    class Selects(Logs):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + 0.0 * batch[0].nonzero().sum()

    alike(make_trainer, graphs, Selects)
    assert graphs.replays == 0
    assert "no CUDA graphs" in caplog.text
    graphs.captured = 0
    train(make_trainer, compile="step")
    assert (graphs.captured, graphs.replays) == (1, 33)


def test_validation_and_prediction_between_replays(make_trainer, graphs):
    counts: Counter[str] = Counter()

    class Watches(fp.Callback):
        def on_validation_end(self, trainer, pl_module):
            counts["validations"] += 1

    results = []
    for compiled in (False, "cudagraphs"):
        torch.manual_seed(0)
        trainer = make_trainer(max_epochs=3, compile=compiled, val_check_interval=5, callbacks=[Watches()])
        trainer.fit(Logs(), loader(), loader(40, shuffle=False))
        results.append(float(trainer.callback_metrics["val_loss"]))
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    assert counts["validations"] > 4
    assert graphs.replays == 33


def test_a_step_that_the_monitor_looks_at_is_captured_and_replayed(make_trainer, graphs, monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_S", 0.0)
    monkeypatch.setattr(monitor, "STEPS_BETWEEN_LOOKS", 1)
    alike(make_trainer, graphs)
    assert graphs.replays == 33


def test_a_language_model_of_transformers_is_replayed(make_trainer, graphs):
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "use_cache": False,
    }  # fmt: skip

    class Words(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

        def training_step(self, batch, batch_idx):
            loss = self.net(input_ids=batch["words"], labels=batch["words"]).loss
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    data = [{"words": torch.randint(128, (4, 32))} for _ in range(12)]
    eager, _, _ = train(make_trainer, Words, data)
    found, _, _ = train(make_trainer, Words, data, compile="cudagraphs")
    torch.testing.assert_close(found, eager, rtol=1e-3, atol=1e-4)
    assert graphs.replays == 33
