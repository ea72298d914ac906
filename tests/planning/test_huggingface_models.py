"""Models of transformers, planned from their configurations by command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from footplate.cli.main import main
from footplate.core.errors import ConfigError
from footplate.planning.diffusion_models import DiffusionModel
from footplate.planning.huggingface_models import configured_model
from footplate.planning.study import plan_for

CONFIGS = Path(__file__).parent / "configs"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03), ("llama-3-70b", 70.6), ("qwen3-8b", 8.19), ("vit-huge", 0.632),
        ("ddpm-cifar10", 0.0357), ("sd-2-base-unet", 0.866), ("sdxl-unet", 2.567),
    ],
)  # fmt: skip
def test_a_well_known_configuration_has_its_published_number_of_parameters(name, billions):
    subject = configured_model(CONFIGS / f"{name}.json", None, None, None, None, None, "bf16-mixed")
    assert sum(p.numel() for p in subject.module.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    assert {p.device.type for p in subject.module.parameters()} == {"meta"}


def test_a_configuration_is_planned_by_command_with_the_best_batch(tmp_path, capsys):
    config = json.loads((CONFIGS / "llama-small.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["--sequence-length", "64", "--batch-size", "8", "--on", "H100:8", "--strategy", "fsdp", "--format", "json"]
    assert main(["plan", str(tmp_path), *argv]) == 0
    plan = json.loads(capsys.readouterr().out)
    (choice,) = plan["choices"]
    assert plan["precision"] == "bf16-mixed"
    assert plan["assumed"] == ["texts of 64 tokens, the model's loss of the next token, AdamW."]
    assert choice["layout"].startswith("fsdp 8")
    assert choice["strategy"].startswith("fp.FSDPStrategy(") or choice["strategy"] == '"fsdp"'
    assert {collective["kind"] for collective in choice["collectives"]} == {"all-gather", "reduce-scatter"}
    assert any(reason.startswith("fsdp 8") and "ms a step" in reason for reason in choice["rejected"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no_such/config.json"], "there is no such file"),
        (["{dir}/list.json"], "expected an object of JSON"),
        (["{dir}/broken.json"], "is no JSON"),
        (["{dir}/nameless.json"], 'names no "architectures"'),
        (["{dir}/nameless.json", "--sequence-length", "0"], "--sequence-length 0"),
        ([f"{CONFIGS}/llama-small.json", "--sequence-length", "513"], "the model has 512 positions"),
        ([f"{CONFIGS}/vit-huge.json", "--sequence-length", "9"], "takes images"),
        ([f"{CONFIGS}/ddpm-cifar10.json", "--sequence-length", "9"], "takes images"),
        (["{dir}/upscaler.json"], "doesn't know class_embed_type='timestep'"),
        (["{dir}/sizeless.json"], 'has no "sample_size"'),
        (["{dir}/dit.json"], "knows UNet2DModel and UNet2DConditionModel"),
        ([f"{CONFIGS}/llama-small.json", "--on", "v5e-8"], "Give --batch-size, or"),
        ([f"{CONFIGS}/llama-small.json", "--on", "H100x8", "--strategy", "fsdq"], "a plan doesn't know it"),
        (["--config", f"{CONFIGS}/llama-small.json", "--model", "transformers:LlamaModel"], "language models"),
        (["--config", f"{CONFIGS}/llama-small.json", "demo"], "goes with --model"),
        (["--model", "torch.nn:Linear", "--sequence-length", "9"], "goes with the config.json"),
    ],
)
def test_a_mistake_is_one_message(argv, said, tmp_path, capsys):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "nameless.json").write_text("{}")
    unet = json.loads((CONFIGS / "ddpm-cifar10.json").read_text())
    (tmp_path / "upscaler.json").write_text(json.dumps(unet | {"class_embed_type": "timestep"}))
    (tmp_path / "sizeless.json").write_text(json.dumps(unet | {"sample_size": None}))
    (tmp_path / "dit.json").write_text(json.dumps({"_class_name": "DiTTransformer2DModel", "num_layers": 1}))
    assert main(["plan", *(word.format(dir=tmp_path) for word in argv)]) == 2
    assert said in capsys.readouterr().err


def test_a_longer_text_than_the_model_has_positions_is_refused():
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        configured_model(CONFIGS / "llama-small.json", None, 1024, None, None, None, "bf16-mixed")


SMALL = {"block_out_channels": [32, 64], "layers_per_block": 1, "sample_size": 16}
TEXTS = {"_class_name": "UNet2DConditionModel", "attention_head_dim": 2, "cross_attention_dim": 48} | {
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "assumed"),
    [
        (
            {"_class_name": "UNet2DModel", "in_channels": 3, "num_class_embeds": 10}
            | {
                "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
                "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
            },
            "images of 3x16x16 of 10 classes",
        ),
        (
            TEXTS
            | {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
            | {"projection_class_embeddings_input_dim": 64},
            "images of 4x16x16 and texts of 77x48, encoded in advance",
        ),
    ],
    ids=["classes", "texts and sizes"],
)
def test_a_diffusion_model_learns_to_predict_noise(values, assumed, tmp_path):
    """The planned step is one that trains: with weights and values, the loss begins at the variance of the noise."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL | values))
    subject = configured_model(tmp_path, None, None, 4, None, None, "32-true")
    assert subject.assumed == (f"{assumed}, the mean square error of predicted noise, AdamW.",)

    import diffusers

    torch.manual_seed(0)
    module = DiffusionModel(getattr(diffusers, values["_class_name"]).from_config(SMALL | values))
    batch = tree_map(lambda leaf: torch.zeros_like(leaf, device="cpu"), subject.batch)
    optimizer = module.configure_optimizers()
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.0, abs=0.2)
    assert sum(losses[5:]) < sum(losses[:5])

    (choice,) = plan_for(replace(subject, free_batch=False), ["H100"]).choices
    assert choice.fits
    assert choice.flops
