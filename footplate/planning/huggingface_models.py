"""Models of transformers and diffusers as subjects of a plan, from a configuration: `footplate plan config.json`.

A configuration is the `config.json` of a model in Hugging Face's format. Its `architectures` name the class, and
`_class_name` does in one of diffusers; `--model` names another one. The model is made on the meta device, without
weights.

The training is the usual one for the kind of model:

    language models     (`…ForCausalLM`) predict the next token, with the model's own loss
    image classifiers   (`…ForImageClassification`) cross entropy of their labels
    diffusion models    (`UNet2D…Model`) predict the noise in an image (`diffusion_models.py`)

with AdamW. The plan states this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.planning import diffusion_models
from footplate.planning.library_models import Supervised, find_callable, one_line
from footplate.planning.subject import Subject
from footplate.training.module import Module

# Longer texts are given with --sequence-length.
LONGEST_DEFAULT = 8192


class LanguageModel(Module):
    """Trains a language model of transformers to predict the next token, with AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Compute the loss of tokens, (B, T) int64."""
        return self.net(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer, AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-4)


def is_configuration(path: Path) -> bool:
    """Return True for a directory with a `config.json`, and for a file of JSON."""
    return path.suffix == ".json" or (path / "config.json").is_file()


def configured_model(
    path: Path,
    model: str | None,
    sequence_length: int | None,
    batch_size: int | None,
    rows: int | None,
    epochs: int | None,
    precision: str,
) -> Subject:
    """Make the subject of a model of transformers or diffusers, from its configuration.

    Args:
        path: the configuration, or the directory that has it.
        model: the class as `transformers:LlamaForCausalLM`; None for that of the configuration.
        sequence_length: the tokens of one text; by default those that the model can have, at most `LONGEST_DEFAULT`.
        batch_size: the global batch size; None to choose it for each target.
        rows: the number of rows of the data set.
        epochs: the number of epochs; 1 by default.
        precision: see `subject.py`.

    Raises:
        ConfigError: the file is no configuration, the class is unknown, or it can't be planned.
    """
    values = _read(path)
    name = model or _class_named_by(values, path)
    kind = find_callable(name)
    try:
        net = _made(kind, values)
    except Exception as error:
        raise ConfigError(f"{path}: {name} can't be made from it: {one_line(error)}") from error

    size = batch_size or 1
    module, batch, assumed = _training(name, net, sequence_length, size)
    return Subject(
        name=f"{name.rpartition(':')[2]}, {sum(p.numel() for p in net.parameters()) / 1e9:.3g} billion parameters",
        module=module,
        batch=batch,
        batch_size=size,
        free_batch=batch_size is None,
        precision=precision,
        rows=rows,
        epochs=epochs or 1,
        assumed=(assumed,),
    )


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file. Give a config.json, or the directory that has it.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} is no JSON: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected an object of JSON, such as the config.json of a model of transformers.")
    return values


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """Make a model without weights."""
    with torch.device("meta"):
        if hasattr(kind, "config_class"):
            return kind(kind.config_class.from_dict(values))
        return kind.from_config(values)


def _class_named_by(values: dict[str, Any], path: Path) -> str:
    if (name := diffusion_models.class_named_by(values)) is not None:
        return name
    architectures = values.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise ConfigError(
            f'{path} names no "architectures". Give the class with --model transformers:LlamaForCausalLM --config {path}.'
        )
    return f"transformers:{architectures[0]}"


def _training(name: str, net: Any, sequence_length: int | None, size: int) -> tuple[Module, Any, str]:
    """Return the module that trains a model, an example batch, and the sentence that states the assumptions."""
    config, main_input = net.config, getattr(net, "main_input_name", None)
    if name.endswith("ForCausalLM") and main_input == "input_ids":
        limit = getattr(config.get_text_config(), "max_position_embeddings", LONGEST_DEFAULT)
        length = sequence_length or min(limit, LONGEST_DEFAULT)
        if length > limit:
            raise ConfigError(f"sequence_length={length}: the model has {limit} positions (max_position_embeddings).")
        tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
        return LanguageModel(net), tokens, f"texts of {length:,} tokens, the model's loss of the next token, AdamW."

    if sequence_length is not None and main_input != "input_ids":
        raise ConfigError(f"sequence_length={sequence_length}: {name} takes images. Leave it out.")
    if main_input is None:
        return diffusion_models.diffusion_training(name, net, size)
    if main_input == "pixel_values" and hasattr(config, "num_labels"):
        side, channels = config.image_size, config.num_channels
        height, width = (side, side) if isinstance(side, int) else side
        images = torch.empty(size, channels, height, width, device="meta")
        labels = torch.empty(size, dtype=torch.int64, device="meta")
        sentence = f"images of {channels}x{height}x{width}, cross entropy over {config.num_labels} classes, AdamW."
        return Supervised(net), (images, labels), sentence

    raise ConfigError(
        f"{name}: a plan by configuration knows language models (…ForCausalLM), image classifiers "
        "(…ForImageClassification) and the U-Nets of diffusers. Plan other models with fp.plan(module, batch, on=[…])."
    )
