"""A language model is fine-tuned with PEFT's LoRA: small checkpoints, generation in validation, and an exact export.

The base is in float32, or quantized to 4 or 8 bits by bitsandbytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models  # noqa: F401  lets torchvision be imported, which transformers looks for
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint

VOCABULARY, LENGTH = 64, 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=4 * LENGTH, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def load_base(base: Path, bits: int | None) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if bits is not None:
        quantization = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    network = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.float32)
    for layer in network.modules():
        # On processors with AVX512-BF16, bitsandbytes rounds the scales of 4-bit weights in the first evaluation, for good.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return network.train()


class FineTuned(fp.Module):
    """A causal language model with PEFT's LoRA.

    Args:
        base: the directory of the base.
        bits: the base is quantized to this number of bits; None leaves it in float32.
    """

    def __init__(self, base: str, bits: int | None = None) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        self.save_hyperparameters()
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network = get_peft_model(load_base(Path(base), bits), config)
        self.texts: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        text = generate(self.network)
        self.texts.append(text)
        self.log("different_tokens", float(text.unique().numel()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def generate(network: Any) -> Tensor:
    prompt = torch.arange(4)[None]
    attends = torch.ones_like(prompt)
    return network.generate(input_ids=prompt, attention_mask=attends, max_new_tokens=8, do_sample=False)


def train(module: FineTuned, directory: Path, epochs: int, ckpt_path: str | None = None, **arguments: Any) -> None:
    trainer = fp.Trainer(
        max_epochs=epochs, default_root_dir=directory, seed=1, logger=False, enable_progress_bar=False,
        num_sanity_val_steps=0, **{"accelerator": "cpu", "save_frozen_weights": False, **arguments},
    )  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(tokens, batch_size=4), DataLoader(tokens[:1]), ckpt_path=ckpt_path)


def logits(network: Any) -> Tensor:
    with torch.no_grad():
        return network.eval()(input_ids=torch.arange(LENGTH)[None]).logits


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_fine_tuning_saves_its_adapters_continues_exactly_and_is_exported(
    base: Path, tmp_path: Path, bits: int | None
):
    from peft import PeftModel

    whole, first, second = (FineTuned(str(base), bits) for _ in range(3))
    train(whole, tmp_path / "whole", 2)
    train(first, tmp_path / "cut", 1)
    train(second, tmp_path / "cut", 2, "last")
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert one.equal(other)
    assert whole.texts[-1].equal(second.texts[-1])

    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    state = checkpoint.load(last)
    assert all("lora" in name or name.endswith(("SCB", "weight_format")) for name in state["state_dict"])
    base_bytes = (base / "model.safetensors").stat().st_size
    assert sum(file.stat().st_size for file in last.resolve().iterdir()) < base_bytes / 2

    # PEFT's own files, on the same base.
    loaded = FineTuned.load_from_checkpoint(last)
    assert logits(loaded.network).equal(logits(whole.network))
    loaded.network.save_pretrained(tmp_path / "adapters")
    again = PeftModel.from_pretrained(load_base(base, bits), tmp_path / "adapters")
    assert logits(again).equal(logits(whole.network))
    assert generate(again).equal(generate(whole.network))


def test_the_merged_model_is_loaded_by_transformers(base: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    module = FineTuned(str(base))
    train(module, tmp_path, 1)
    expected = logits(module.network)
    module.network.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)


def test_a_base_that_was_changed_on_the_disk_is_refused(base: Path, tmp_path: Path):
    train(FineTuned(str(base)), tmp_path, 1)
    other = load_base(base, None)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(
        fp.CheckpointError, match=r"has other numbers in network.base_model.model.lm_head.weight. Build"
    ):
        FineTuned.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt", base=str(tmp_path / "other"))


@pytest.mark.parametrize("bits", [4, 8])
def test_xla_refuses_a_quantized_base(base: Path, tmp_path: Path, bits: int):
    with pytest.raises(
        fp.ConfigError, match=r"q_proj.base_layer.weight is a .*: only the kernels of bitsandbytes read"
    ):
        train(FineTuned(str(base), bits), tmp_path, 1, accelerator="xla")


def test_a_checkpoint_with_a_4_bit_base_says_how_to_train_so_that_it_can_be_loaded(base: Path, tmp_path: Path):
    train(FineTuned(str(base), 4), tmp_path, 1, save_frozen_weights=True)
    with pytest.raises(
        fp.CheckpointError, match=r"can't load the weights that it has saved .* save_frozen_weights=False"
    ):
        FineTuned.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
