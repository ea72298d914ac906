"""`FSDPStrategy` on one GPU, with NCCL: a world of one takes every path but the wire."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
from distributed.test_fsdp_options import Block
from models.small import dataset
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp


class Blocks(fp.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            self.net = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 3))
        for layer in self.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(make_trainer: Any, model: Any = None, **settings: Any) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    model = model or Blocks()
    trainer = make_trainer(**{"max_epochs": 2, **settings})
    trainer.fit(model, DataLoader(dataset(64), 16), DataLoader(dataset(32), 16))
    state = trainer.parallel.state_dict(model)
    if trainer.parallel.sharded:
        state = trainer.parallel.whole(state)
    return {name: value.cpu() for name, value in state.items()}, trainer


OPTIONS = {
    "types": {"auto_wrap_policy": {Block}},
    "recomputed": {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}},
    "SHARD_GRAD_OP": {"auto_wrap_policy": {Block}, "sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"auto_wrap_policy": {Block}, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 1)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_learns_what_a_whole_model_learns(make_trainer, name):
    whole, _ = trained(make_trainer, gradient_clip_val=0.5)
    found, _ = trained(make_trainer, gradient_clip_val=0.5, strategy=fp.FSDPStrategy(**OPTIONS[name]))
    for key, value in whole.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_weights_are_gathered_in_bfloat16(make_trainer):
    whole, _ = trained(make_trainer, precision="bf16-mixed")
    found, made = trained(make_trainer, precision="bf16-mixed", strategy=fp.FSDPStrategy({Block}))
    assert all(value.dtype == torch.float32 for value in found.values())
    assert made.callback_metrics["val_loss"].isfinite()
    for key, value in whole.items():
        torch.testing.assert_close(found[key], value, rtol=0.1, atol=0.03)


def test_a_model_from_the_meta_device_resumes_bit_for_bit(make_trainer, tmp_path):
    strategy = fp.FSDPStrategy({Block})
    whole, _ = trained(
        make_trainer, Blocks("meta"), strategy=strategy, max_epochs=4, default_root_dir=tmp_path / "whole"
    )
    trained(make_trainer, Blocks("meta"), strategy=strategy, max_epochs=2, default_root_dir=tmp_path / "cut")
    trainer = make_trainer(max_epochs=4, strategy=strategy, default_root_dir=tmp_path / "cut")
    model = Blocks("meta")
    trainer.fit(model, DataLoader(dataset(64), 16), DataLoader(dataset(32), 16), ckpt_path="last")
    found = trainer.parallel.whole(trainer.parallel.state_dict(model))
    for key, value in whole.items():
        assert torch.equal(found[key].cpu(), value), key


def test_weights_in_files_are_read_into_shards_on_the_gpu(make_trainer, tmp_path):
    torch.manual_seed(3)
    model = Blocks()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "blocks.safetensors")
    loaded = Blocks("meta")
    fp.load_pretrained(loaded, tmp_path / "blocks.safetensors")
    whole, _ = trained(make_trainer, model)
    found, _ = trained(make_trainer, loaded, strategy=fp.FSDPStrategy({Block}))
    for key, value in whole.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_compiled_layers_of_a_sharded_model(make_trainer):
    whole, _ = trained(make_trainer)
    found, _ = trained(make_trainer, strategy=fp.FSDPStrategy({Block}), compile=True)
    for key, value in whole.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-3)


def test_a_llama_of_transformers_trains_from_the_meta_device(make_trainer):
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, int] = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 512,
    }  # fmt: skip

    class Llama(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

        def training_step(self, batch, batch_idx):
            loss = self.net(input_ids=batch, labels=batch).loss
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    words = torch.arange(64).remainder(7).repeat(8, 1)
    trainer = make_trainer(
        strategy=fp.FSDPStrategy({"LlamaDecoderLayer"}, {"LlamaDecoderLayer"}), precision="bf16-mixed", max_epochs=1,
        deterministic=None,
    )  # fmt: skip
    trainer.fit(Llama(), [words] * 40)
    assert float(trainer.callback_metrics["train_loss"]) < 2.0
