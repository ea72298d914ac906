"""Make a Delta table of series, the hourly demand of some stations, and cut it into tables of windows.

    python data.py                                  # 100 stations, 120 days
    python data.py --stations 5000 --days 400

A row of lake/series is a station: its number, and its values, oldest first. To use series of your own, write that table,
and call `write_windows`. All series begin at the same hour.
"""

import argparse

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

HOURS = 24
PAST, FUTURE = 14 * HOURS, HOURS  # hours that the forecaster sees, and hours that it forecasts
EVERY = 12  # hours between two windows of a series


def demand(stations: int, days: int, rng: np.random.Generator) -> np.ndarray:  # (stations, days × 24)
    """Draw demand: a profile of the day and of the week, and weather that all stations share and that changes slowly."""
    time = np.arange(days * HOURS)
    hour, day = time % HOURS, time // HOURS
    weather = np.zeros(len(time))
    for step in range(1, len(time)):
        weather[step] = 0.98 * weather[step - 1] + 0.2 * rng.normal()
    series = []
    for _ in range(stations):
        morning, evening, level = rng.uniform(6, 9), rng.uniform(16, 20), rng.lognormal(3, 0.5)
        peaks = np.exp(-((hour - morning) ** 2) / 6) + rng.uniform(0.5, 1.5) * np.exp(-((hour - evening) ** 2) / 8)
        weekend = np.where(day % 7 >= 5, rng.uniform(0.3, 0.8), 1.0)
        growth = 1 + rng.uniform(-0.3, 0.6) * time / len(time)
        expected = level * (0.2 + peaks * weekend) * growth * np.exp(rng.uniform(0.2, 0.5) * weather)
        series.append(rng.poisson(expected))
    return np.array(series, np.float32)


def write_windows() -> None:
    """Cut the series into windows. The time of a window decides what it is for, so that no test value was trained on.

    … train … | val: the last but one tenth | test: the last tenth
    """
    batches = DeltaTable("lake/series").to_pyarrow_dataset().to_batches(columns=["station", "values"], batch_size=256)
    for number, batch in enumerate(batches):
        values = np.stack(batch["values"].to_numpy(zero_copy_only=False))  # (stations, hours)
        hours = values.shape[1]
        ends = np.arange(PAST + FUTURE, hours + 1, EVERY)
        begins_of_forecasts = ends - FUTURE
        parts = {
            "train": ends <= 0.8 * hours,
            "val": (begins_of_forecasts >= 0.8 * hours) & (ends <= 0.9 * hours),
            "test": begins_of_forecasts >= 0.9 * hours,
        }
        for part, chosen in parts.items():
            windows = [row[end - PAST - FUTURE : end] for row in values for end in ends[chosen]]
            kind = pa.list_(pa.float32(), PAST + FUTURE)
            table = pa.table({"window": pa.array(windows, kind)})
            write_deltalake(f"lake/{part}", table, mode="append" if number else "overwrite")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stations", type=int, default=100)
    parser.add_argument("--days", type=int, default=120)
    args = parser.parse_args()
    values = demand(args.stations, args.days, np.random.default_rng(0))
    write_deltalake(
        "lake/series", pa.table({"station": np.arange(len(values)), "values": list(values)}), mode="overwrite"
    )
    write_windows()
    print(f"lake/series has {len(values):,} stations with {values.shape[1]:,} hours each.")
