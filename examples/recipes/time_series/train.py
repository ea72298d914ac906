"""Train a forecaster on windows of series, and compare it with the seasonal naive forecast.

    python data.py && python train.py

If the training was interrupted, start it again: it continues. Delete runs/time_series to begin from scratch.
"""

import numpy as np
from data import FUTURE, PAST
from model import Forecaster

import footplate as fp

SEASON = 7 * 24
RUN = "runs/time_series"


def seasonal_naive(window: np.ndarray) -> np.ndarray:
    """The forecast that repeats the values of a season ago."""
    return window[:, PAST - SEASON : PAST - SEASON + FUTURE]


def print_errors(window: np.ndarray, forecasts: dict[str, np.ndarray]) -> None:
    actual = window[:, PAST:]
    print(f"{'':16}{'MAE':>10}{'RMSE':>10}{'WAPE':>10}")
    for name, forecast in forecasts.items():
        error = np.abs(forecast - actual)
        squared = np.sqrt(np.square(error).mean())
        print(f"{name:16}{error.mean():10.4f}{squared:10.4f}{error.sum() / actual.sum():10.4f}")


def main() -> None:
    fp.seed_everything(1)  # every process then makes the same model
    data = fp.TableDataModule(train="lake/train", val="lake/val", predict="lake/test", batch_size=128)
    best = fp.ModelCheckpoint(monitor="val_loss")
    trainer = fp.Trainer(max_epochs=10, callbacks=best, default_root_dir=RUN)
    trainer.fit(Forecaster(PAST, FUTURE, SEASON), data, ckpt_path="last")
    predictions = trainer.predict(datamodule=data, output=f"{RUN}/predictions")

    if trainer.is_global_zero:
        rows = predictions.head(predictions.num_rows)
        window, forecast = np.stack(rows["window"].to_numpy()), np.stack(rows["forecast"].to_numpy())
        print_errors(window, {"this network": forecast, "seasonal naive": seasonal_naive(window)})


if __name__ == "__main__":
    main()
