"""LightningModules that control optimisation, or the code around it, themselves. `zoo` has the other modules."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from models.zoo import Plain


class Skips(Plain):
    """Returns None for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 4, 9) else super().training_step(batch, batch_idx)


class EndsEpochEarly(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 6 else None


class StopsItself(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 13:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class WarmUp(Plain):
    """The warm-up of Lightning's documentation: it overrides `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 8:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, float(self.trainer.global_step + 1) / 8)


class StepsEverySecondBatch(Plain):
    """Lightning's documentation: step less often, and run only the closure otherwise."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class OwnClipping(Plain):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value = 0.01 if self.current_epoch else 0.1
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


class OwnZeroGrad(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class LBFGS(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class FrozenPart(Plain):
    """A part that is frozen and kept in evaluation mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[1].eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Transfers(Plain):
    """Changes batches when they are transferred."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class OnlyBatch(Plain):
    """Steps with the batch as their only argument."""

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


class Gan(pl.LightningModule):
    """A generative adversarial network as Lightning's documentation writes it: two optimizers, toggled, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        noise = torch.sin(real[:, :4] * 7)
        g_opt, d_opt = self.optimizers()

        self.toggle_optimizer(g_opt)
        g_loss = F.binary_cross_entropy_with_logits(
            self.discriminator(self.generator(noise)), torch.ones(len(real), 1, device=self.device)
        )
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        g_opt.step()
        g_opt.zero_grad()
        self.untoggle_optimizer(g_opt)

        self.toggle_optimizer(d_opt)
        real_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), torch.ones(len(real), 1))
        fake = self.generator(noise).detach()
        fake_loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), torch.zeros(len(real), 1))
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        self.clip_gradients(d_opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        d_opt.step()
        d_opt.zero_grad()
        self.untoggle_optimizer(d_opt)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=1e-2)
        return [g_opt, d_opt], [StepLR(g_opt, 1, 0.5), StepLR(d_opt, 1, 0.9)]


class ManualAccumulation(Plain):
    """Manual optimisation that steps every third batch, with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Backbone(Plain):
    """A module in the form that BackboneFinetuning expects."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[:2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Unfreeze(BaseFinetuning):
    """Lightning's example of a fine-tuning callback."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class LogsFromCallback(pl.Callback):
    """Logs through the module and through itself, and has state to save."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[0])
        pl_module.log("seen", float(self.seen), on_step=True, on_epoch=False)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("seen_so_far", float(self.seen))
        self.log("from_itself", float(self.seen))
