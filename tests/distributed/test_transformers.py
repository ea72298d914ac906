"""Models of transformers, built on the meta device.

A Llama is trained by four ranks in memory that one rank couldn't hold it in. They are killed, and two go on. It is
exported, and transformers loads it and generates the same text. FSDP2 does this alone, and with tensor parallelism.
The plans of transformers cut its models so that they compute what they compute in one process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

import models  # noqa: F401  lets torchvision be imported, which transformers looks for
import pytest
import torch
from models import ranks
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.distributed.meta_device import initializers_of, innermost_first, materialize
from footplate.distributed.tensor_parallel_plan import planned_layers

from .common import make, same

BLOCK = {"LlamaDecoderLayer"}
VOCABULARY, LENGTH = 512, 8
# Weights, gradients and the two moments of Adam take 4 × 75 MB. A quarter of that fits, with what a step and a save need.
MARGIN_MB = 270
ROWS = 32
# Blocks from this size on are returned to the system when they are freed. By default, glibc would keep them.
M_MMAP_THRESHOLD, BYTES = -3, 1 << 20


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Text(fp.Module):
    """A Llama, for whose training a rank has `margin_mb` of memory. None for as much as there is."""

    margin_mb: float | None = None

    def configure_model(self):
        if not hasattr(self, "llama"):
            if self.margin_mb is not None:
                limit_memory(self.margin_mb)
            with torch.device("meta"):
                self.llama = make_llama()

    def training_step(self, batch, batch_idx):
        loss = self.llama(input_ids=batch, labels=batch).loss
        print(self.trainer.global_step, loss.item(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


class KilledAfter(fp.Callback):
    """Kills this rank after a step, when a checkpoint is whole."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            deadline = time.monotonic() + 100
            while checkpoint.newest([trainer.checkpoint_dir]) is None:
                assert time.monotonic() < deadline, "no checkpoint became whole"
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def data_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) / 1024


def limit_memory(margin_mb: float) -> None:
    """Let this process have so much more memory than it has now."""
    with torch.device("meta"):
        make_llama()  # imports what a Llama needs
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, BYTES)
    limit = int((data_mb() + margin_mb) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def train(root, batch_size, max_steps, strategy, margin_mb=None, callbacks=(), **arguments):
    trainer = fp.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=max_steps, logger=False, enable_progress_bar=False, seed=1,
        enable_model_summary=False, default_root_dir=root, enable_monitor=False,
        callbacks=[fp.ModelCheckpoint(every_n_train_steps=1, save_last=True), *callbacks],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Text()
    model.margin_mb = margin_mb
    rows = [(7 * row + torch.arange(LENGTH)) % VOCABULARY for row in range(ROWS)]
    trainer.fit(model, DataLoader(rows, batch_size), **arguments)
    return trainer.global_step, {
        type(layer).__mro__[2].__name__ for layer in model.modules() if hasattr(layer, "reshard")
    }


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_DECODERS = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "Llama": ("LlamaForCausalLM", OF_DECODERS),
    "Qwen3": ("Qwen3ForCausalLM", OF_DECODERS),
    "Gemma2": ("Gemma2ForCausalLM", OF_DECODERS),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Bert": ("BertForMaskedLM", SIZES),
    "T5": ("T5ForConditionalGeneration", {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "d_kv": 8}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_get_the_numbers_that_they_draw_when_they_are_built(family):
    import transformers

    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    built = getattr(transformers, name)(config)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    materialize(innermost_first(model), torch.device("cpu"), initializers_of(model))

    expected = dict(built.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if expected[name].std() > 0 and parameter.numel() > 200:
            torch.testing.assert_close(parameter.std(), expected[name].std(), rtol=0.25, atol=0, msg=name)
        elif expected[name].std() == 0:
            assert torch.equal(parameter, expected[name]), name
    for (name, buffer), (_, drawn) in zip(model.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(buffer, drawn), name


SHARDED = fp.FSDPStrategy(auto_wrap_policy=BLOCK, activation_checkpointing_policy=BLOCK)
CUT = fp.ModelParallelStrategy(tensor_parallel_size=2, auto_wrap_policy=BLOCK, activation_checkpointing_policy=BLOCK)


def test_one_rank_cannot_hold_it(tmp_path):
    with pytest.raises(AssertionError, match="can't allocate memory"):
        ranks.run(lambda: train(tmp_path, 8, 2, "auto", MARGIN_MB), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rows"), [(SHARDED, (2, 4)), (CUT, (4, 8))], ids=["sharded", "cut and sharded"])
def test_a_llama_that_one_rank_cannot_hold_trains_on_four_goes_on_with_two_and_generates_in_transformers(
    tmp_path, strategy, rows
):
    from transformers import LlamaForCausalLM

    run = tmp_path / "run"
    with pytest.raises(AssertionError, match="exit statuses"):
        ranks.run(lambda: train(run, rows[0], 3, strategy, MARGIN_MB, [KilledAfter(2)]), 4, timeout_s=300.0)
    assert checkpoint.read_meta(checkpoint.newest([run / "checkpoints"]))["global_step"] in (1, 2)

    first, second = ranks.run(lambda: train(run, rows[1], 3, strategy, ckpt_path="last"), 2)
    assert first == second == (3, {"LlamaDecoderLayer", "Text"})

    model = Text.load_from_checkpoint(checkpoint.newest([run / "checkpoints"]))
    model.llama.save_pretrained(tmp_path / "exported")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "exported")
    start = torch.tensor([[1, 2, 3]])
    written = loaded.generate(start, max_new_tokens=8, do_sample=False)
    assert torch.equal(written, model.llama.generate(start, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text"])
def test_the_plans_of_transformers_cut_a_model_that_learns_the_same(tmp_path, family):
    import transformers

    name = {"Gemma3Text": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**OF_DECODERS)

    class Learner(fp.Module):
        def __init__(self):
            super().__init__()
            self.model = getattr(transformers, name)(config)

        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            # Adam makes large steps of gradients that are rounding errors.
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    def learn(root, strategy):
        torch.manual_seed(0)
        trainer, module = make(root, strategy=strategy, max_epochs=1, gradient_clip_val=0.5), Learner()
        rows = [(7 * row + torch.arange(LENGTH)) % OF_DECODERS["vocab_size"] for row in range(16)]
        trainer.fit(module, DataLoader(rows, 4))
        state = trainer.parallel.state_dict(module)
        cut = {name for name, value in state.items() if getattr(value, "_local_tensor", value).shape != value.shape}
        return trainer.parallel.whole(state), cut

    whole, _ = learn(tmp_path / "whole", "auto")
    for learned, cut in ranks.run(lambda: learn(tmp_path / "cut", fp.ModelParallelStrategy(1, 2)), 2):
        same(whole, learned)
        assert "model.model.layers.1.self_attn.q_proj.weight" in cut
        assert "model.lm_head.weight" in cut


def test_a_size_that_does_not_divide_the_heads_is_refused():
    import transformers

    config = transformers.LlamaConfig(**OF_DECODERS)
    with pytest.raises(fp.ConfigError, match=r"tensor_parallel_size=4: .* num_key_value_heads=2"):
        planned_layers(transformers.LlamaForCausalLM(config), 4)


def test_a_style_of_transformers_that_is_not_known_is_refused():
    import transformers

    config = transformers.Qwen3MoeConfig(**OF_DECODERS, num_experts=2, moe_intermediate_size=16, num_experts_per_tok=1)
    with pytest.raises(fp.ConfigError, match=r"which Footplate doesn't know. It knows colwise, rowwise"):
        planned_layers(transformers.Qwen3MoeForCausalLM(config), 2)
