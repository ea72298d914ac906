"""Models of torchvision, timm, transformers and torch, as their libraries make them, in small configurations.

They have random weights, no dropout (whose numbers differ by construction), and batches of the form that each model takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import let_torchvision_be_imported
from torch import Tensor, nn
from torch.nn import functional as F

import footplate as fp

let_torchvision_be_imported()

CLASSES, WORDS, LENGTH = 4, 48, 12


@dataclass(frozen=True)
class Entry:
    """A model to compare.

    Attributes:
        make: makes the module to train. draw: makes a batch with a number of rows. in_half: True if eager torch's losses in
        bfloat16 are close to its losses in single precision, so that ours can be too.
    """

    make: Callable[[], fp.Module]
    draw: Callable[[int], Any]
    in_half: bool = True


class Classifier(fp.Module):
    """Trains an image classifier."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss


class Tagger(fp.Module):
    """Trains a recurrent network to predict the next word."""

    def __init__(self, cell: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.net = cell(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.net(self.words(batch["input_ids"]))[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss


class Transformer(fp.Module):
    """Trains a model of transformers, whose output has the loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss
        self.log("train_loss", loss)
        return loss


class Mixture(Transformer):
    """Trains a mixture of experts.

    Eager torch's grouped product doesn't support double precision. There, eager torch loops over the experts. A captured
    step can't have this loop, because the number of rows of an expert depends on values.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not torch.compiler.is_compiling():
            config: Any = self.net.config
            config._experts_implementation = "eager"
        return super().training_step(batch, batch_idx)


def _images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.randint(0, CLASSES, (rows,))


def _large_images(rows: int) -> tuple[Tensor, Tensor]:
    """A batch for networks that shrink images by 32.

    Smaller images would leave batch norm one pixel each of two images. Its result would only be their order.
    """
    return torch.randn(rows, 3, 64, 64), torch.randint(0, CLASSES, (rows,))


def _texts(rows: int) -> dict[str, Tensor]:
    words = torch.randint(1, WORDS, (rows, LENGTH))
    return {"input_ids": words, "labels": words.roll(-1, 1)}


def _padded_texts(rows: int) -> dict[str, Tensor]:
    words = torch.randint(1, WORDS, (rows, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (rows, 1))).long()
    return {"input_ids": words * mask, "attention_mask": mask, "labels": torch.randint(0, CLASSES, (rows,))}


def _torchvision(name: str) -> Callable[[], fp.Module]:
    def make() -> fp.Module:
        from torchvision import models
        from torchvision.models.convnext import CNBlockConfig
        from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
        from torchvision.models.resnet import BasicBlock

        if name == "resnet":
            net: nn.Module = models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
        elif name == "convnext":
            net = models.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=CLASSES)
        elif name == "efficientnet":
            blocks = [
                FusedMBConvConfig(2, 3, 2, 8, 8, 1),
                MBConvConfig(4, 3, 2, 8, 16, 1),
                MBConvConfig(4, 5, 1, 16, 16, 1),
            ]
            net = models.EfficientNet(blocks, 0.0, stochastic_depth_prob=0.0, num_classes=CLASSES)
        else:
            net = models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES)
        return Classifier(net)

    return make


def _timm(name: str, **settings: Any) -> Callable[[], fp.Module]:
    def make() -> fp.Module:
        import timm

        return Classifier(timm.create_model(name, num_classes=CLASSES, **settings))

    return make


def _transformers(name: str, trained: Any = Transformer, **settings: Any) -> Callable[[], fp.Module]:
    def make() -> fp.Module:
        import transformers

        model = getattr(transformers, name)
        return trained(model(model.config_class(vocab_size=WORDS, **settings)))

    return make


_WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

ENTRIES: dict[str, Entry] = {
    "torchvision ResNet": Entry(_torchvision("resnet"), _large_images),
    "torchvision ConvNeXt": Entry(_torchvision("convnext"), _images),
    "torchvision EfficientNet": Entry(_torchvision("efficientnet"), _images),
    "torchvision ViT": Entry(_torchvision("vit"), _images),
    "timm ResNet": Entry(_timm("resnet10t"), _large_images),
    "timm ConvNeXt": Entry(_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), _images),
    "timm ViT": Entry(
        _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2), _images
    ),
    "timm Swin": Entry(
        _timm(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 2),
            drop_path_rate=0.0,
        ),
        _images,
    ),
    "timm RegNet": Entry(_timm("regnetx_002"), _large_images),
    "timm MobileNetV3": Entry(_timm("mobilenetv3_small_050", drop_rate=0.0), _large_images, in_half=False),
    "timm BEiT": Entry(
        _timm("beit_base_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2), _images
    ),
    "BERT": Entry(
        _transformers("BertForSequenceClassification", num_labels=CLASSES, **_WIDTHS, **_NO_DROPOUT), _padded_texts
    ),
    "DistilBERT": Entry(
        _transformers(
            "DistilBertForSequenceClassification", num_labels=CLASSES, dim=16, n_layers=2, n_heads=2, hidden_dim=32,
            dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        ),
        _padded_texts,
    ),
    "GPT-2": Entry(
        _transformers("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        _texts,
    ),
    "Llama": Entry(_transformers("LlamaForCausalLM", num_key_value_heads=1, **_WIDTHS), _texts),
    "Qwen2": Entry(_transformers("Qwen2ForCausalLM", num_key_value_heads=1, **_WIDTHS), _texts),
    "T5": Entry(
        _transformers(
            "T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        _texts,
    ),
    "Mixtral": Entry(
        _transformers("MixtralForCausalLM", Mixture, num_key_value_heads=1, num_local_experts=4, **_WIDTHS), _texts
    ),
    "GRU": Entry(lambda: Tagger(nn.GRU), _texts),
    "LSTM": Entry(lambda: Tagger(nn.LSTM), _texts),
}  # fmt: skip


def _detection() -> fp.Module:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    class Detector(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, boxes, labels = batch
            targets = [{"boxes": one, "labels": label} for one, label in zip(boxes, labels, strict=True)]
            return torch.stack(list(self.net(list(images), targets).values())).sum()

    return Detector(fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=CLASSES))


def _boxes(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    corner = torch.rand(rows, 1, 4) * 8
    return torch.rand(rows, 3, 32, 32), corner + torch.tensor([0.0, 0, 16, 16]), torch.ones(rows, 1, dtype=torch.long)


def _small_network() -> fp.Module:
    layers = [nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(900, CLASSES)]
    return Classifier(nn.Sequential(*layers))


QUICK: dict[str, Entry] = {
    "small convolutional net": Entry(_small_network, _images),
}
"""The model of a quick run, which is captured and compiled in seconds."""

UNFIT: dict[str, Entry] = {
    "torchvision Faster R-CNN": Entry(_detection, _boxes),
}
"""Models that can't be captured, because something in them depends on values."""
