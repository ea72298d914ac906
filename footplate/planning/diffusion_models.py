"""U-Nets of diffusers as subjects of a plan, from a configuration: `footplate plan unet/config.json`.

The training is the usual one, after Ho et al., "Denoising Diffusion Probabilistic Models": noise is added to an image by
a random number of steps, and the network predicts this noise. The loss is its mean square error, the optimizer AdamW.

A network that is conditioned on a text gets the text as CLIP encodes it, `TEXT_TOKENS` vectors. Images and texts are
inputs: encoding them isn't part of the training, as in trainings that encode them in advance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from footplate.core.errors import ConfigError
from footplate.training.module import Module

TEXT_TOKENS = 77
STEPS = 1000  # of noise
# What Stable Diffusion XL knows of an image beside its text: the size, the place it was cropped from, the size to make.
TIME_IDS = 6


class DiffusionModel(Module):
    """Trains a U-Net of diffusers to predict noise, with AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, dict[str, Any]], batch_idx: int) -> Tensor:
        """Compute the loss of images, (B, C, H, W), and conditions, the other arguments of the network."""
        images, conditions = batch
        steps = torch.randint(0, STEPS, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        angle = (steps * (math.pi / 2 / STEPS)).to(images.dtype).reshape(-1, 1, 1, 1)
        noisy = torch.cos(angle) * images + torch.sin(angle) * noise
        return F.mse_loss(self.net(noisy, steps, **conditions).sample.float(), noise.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer, AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-4)


def class_named_by(values: Mapping[str, Any]) -> str | None:
    """Return the class that a configuration of diffusers names, as `diffusers:UNet2DModel`; None for other ones."""
    name = values.get("_class_name")
    return f"diffusers:{name}" if isinstance(name, str) else None


def diffusion_training(name: str, net: Any, size: int) -> tuple[Module, Any, str]:
    """Return the module that trains a U-Net, an example batch on the meta device, and a sentence that states both.

    Args:
        name: the class.
        net: the model.
        size: the number of images.

    Raises:
        ConfigError: the model isn't one of the U-Nets that a plan knows, or has a condition that it doesn't know.
    """
    config = net.config
    kind = type(net).__name__
    if kind not in ("UNet2DModel", "UNet2DConditionModel"):
        raise ConfigError(
            f"{name}: of diffusers, a plan by configuration knows UNet2DModel and UNet2DConditionModel. Plan other models "
            "with fp.plan(module, batch, on=[…])."
        )
    side = config.sample_size
    if side is None:
        raise ConfigError(f'{name}: the configuration has no "sample_size", the height and width of the images.')
    height, width = (side, side) if isinstance(side, int) else side
    images = torch.empty(size, config.in_channels, height, width, device="meta")
    conditions, stated = _conditions(name, config, size, text=kind == "UNet2DConditionModel")

    sentence = (
        f"images of {config.in_channels}x{height}x{width}{stated}, the mean square error of predicted noise, AdamW."
    )
    return DiffusionModel(net), (images, conditions), sentence


def _conditions(name: str, config: Any, size: int, text: bool) -> tuple[dict[str, Any], str]:
    """Return the other arguments of a network, and words that state them."""
    unknown = {
        key: config.get(key)
        for key in ("class_embed_type", "encoder_hid_dim_type", "addition_embed_type", "time_cond_proj_dim")
        if config.get(key) is not None and (key, config[key]) != ("addition_embed_type", "text_time")
    }
    if unknown:
        key, value = next(iter(unknown.items()))
        raise ConfigError(
            f"{name}: a plan by configuration doesn't know {key}={value!r}. Plan it with fp.plan(module, batch, on=[…])."
        )

    conditions: dict[str, Any] = {}
    stated = ""
    if config.get("num_class_embeds") is not None:
        conditions["class_labels"] = torch.empty(size, dtype=torch.int64, device="meta")
        stated = f" of {config.num_class_embeds} classes"
    if text:
        width = config.cross_attention_dim
        conditions["encoder_hidden_states"] = torch.empty(size, TEXT_TOKENS, width, device="meta")
        stated = f" and texts of {TEXT_TOKENS}x{width}, encoded in advance"
    if config.get("addition_embed_type") == "text_time":
        pooled = config.projection_class_embeddings_input_dim - TIME_IDS * config.addition_time_embed_dim
        conditions["added_cond_kwargs"] = {
            "text_embeds": torch.empty(size, pooled, device="meta"),
            "time_ids": torch.empty(size, TIME_IDS, device="meta"),
        }
    return conditions, stated
