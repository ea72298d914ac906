"""Fine-tune a language model of transformers with LoRA."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp
from footplate.data import next_token_targets


class LoraLinear(nn.Module):
    """A frozen linear layer, and a trainable product of two small matrices that is added to its weight.

    Args:
        linear: the layer.
        rank: the inner size of the product.
        alpha: the product is scaled by `alpha / rank`.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at the beginning, the layer computes what it did before

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * self.up(self.down(x))

    def merged(self) -> nn.Linear:
        """The linear layer with the product in its weight."""
        with torch.no_grad():
            self.linear.weight += self.scale * self.up.weight @ self.down.weight
        return self.linear


def add_lora(network: nn.Module, layers: list[str], rank: int, alpha: float) -> None:
    """Freeze a network, and make its linear layers with these names trainable by LoRA."""
    network.requires_grad_(False)
    found = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    chosen = [name for name in found if name.rpartition(".")[2] in layers]
    if not chosen:
        last_names = sorted({name.rpartition(".")[2] for name in found})
        raise fp.ConfigError(f"layers={layers}: the network has no such linear layers. It has {', '.join(last_names)}.")
    for name in chosen:
        network.set_submodule(name, LoraLinear(network.get_submodule(name), rank, alpha))


def merge_lora(network: nn.Module) -> None:
    """Put what LoRA has learned into the weights of the network, which has its own layers again."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, LoraLinear):
            network.set_submodule(name, layer.merged())


class LanguageModel(fp.Module):
    """Predicts the next token of packed documents. A document doesn't see the others of its sequence.

    Args:
        network: a causal language model of transformers.
        lr: the learning rate.
    """

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.network, self.lr = network, lr

    def loss_sum(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all targets, and the number of targets."""
        tokens, positions = batch["tokens"], batch["position_ids"]
        logits = self.network(input_ids=tokens, position_ids=positions, use_cache=False).logits
        targets = next_token_targets(tokens, batch["document_ids"])  # -100 after the end of a document
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss, (targets != -100).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss_sum, weight = self.loss_sum(batch)
        self.log("train_loss", loss_sum / weight)
        return {"loss_sum": loss_sum, "weight": weight}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss_sum, weight = self.loss_sum(batch)
        # A mean over sequences: packed sequences have about the same number of targets.
        self.log("val_loss", loss_sum / weight, prog_bar=True)

    def configure_optimizers(self) -> dict:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=self.lr, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class FineTune(LanguageModel):
    """Fine-tunes a pretrained model with LoRA.

    Args:
        base: the directory of a model, or its name on the Hugging Face hub.
        layers: the names of the linear layers that learn.
        rank: see `LoraLinear`.
        alpha: see `LoraLinear`.
        lr: the learning rate.
    """

    def __init__(self, base: str, layers: list[str], rank: int = 8, alpha: float = 16.0, lr: float = 2e-4) -> None:
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_pretrained(base).train()
        add_lora(network, layers, rank, alpha)
        super().__init__(network, lr)
        self.save_hyperparameters()
