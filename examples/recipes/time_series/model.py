"""A forecaster: a convolution over the past, and a forecast of all coming hours at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp


class Forecaster(fp.Module):
    """Forecasts the coming values of a series from its past ones.

    A window is scaled by its own mean and spread, so that small and large series are alike to the network. The network adds
    a correction to the values of a season ago.

    Args:
        past: the hours of a window that the network sees.
        future: the hours that it forecasts.
        season: the length of a season, such as the hours of a week. At least `future`, and at most `past`.
    """

    def __init__(self, past: int, future: int, season: int, width: int = 64, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, width // 2, kernel_size=24, stride=12), nn.GELU(), nn.Conv1d(width // 2, width, 3), nn.GELU()
        )
        steps = (past - 24) // 12 + 1 - 2
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(width * steps, 128), nn.GELU(), nn.Linear(128, future))

    def forward(self, window: Tensor) -> Tensor:  # (B, past + …) → (B, future)
        past, future, season = self.hparams.past, self.hparams.future, self.hparams.season
        seen = window[:, :past]
        mean, spread = seen.mean(1, keepdim=True), seen.std(1, keepdim=True) + 1e-3
        scaled = (seen - mean) / spread
        a_season_ago = scaled[:, past - season : past - season + future]
        return (a_season_ago + self.head(self.convolutions(scaled[:, None]))) * spread + mean

    def scaled_error(self, window: Tensor) -> Tensor:
        """The mean absolute error, in parts of each window's mean."""
        past = self.hparams.past
        scale = window[:, :past].mean(1, keepdim=True) + 1e-3
        return F.l1_loss(self(window) / scale, window[:, past:] / scale)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.scaled_error(batch["window"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.scaled_error(batch["window"]), prog_bar=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"window": batch["window"], "forecast": self(batch["window"])}

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
