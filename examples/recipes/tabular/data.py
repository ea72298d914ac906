"""Make two Delta tables of deliveries: numbers, categories, missing values, and whether each delivery came late.

    python data.py                     # 200,000 rows in lake/train, and a quarter of that in lake/test
    python data.py --rows 20000000

To use tables of your own, replace this file, and change the names of the columns in train.py.
"""

import argparse

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

CARRIERS = np.array(["Arrow", "Bluebird", "Comet", "Drifter", "Express"])
REGIONS = np.array([f"region {number:02}" for number in range(40)])
WEATHER = np.array(["dry", "rain", "snow", "storm"])
CHUNK = 500_000  # rows in memory at once


def deliveries(rows: int, rng: np.random.Generator) -> pa.Table:
    """Draw deliveries. How likely one is late depends on the columns together, not only on each alone."""
    carrier, weather = rng.integers(0, len(CARRIERS), rows), rng.choice(len(WEATHER), rows, p=[0.6, 0.25, 0.1, 0.05])
    region, hour = rng.integers(0, len(REGIONS), rows), rng.integers(0, 24, rows)
    distance_km = rng.gamma(2.0, 40.0, rows).astype(np.float32)
    weight_kg = rng.lognormal(1.0, 1.0, rows).astype(np.float32)

    rush_hour = np.isin(hour, (7, 8, 16, 17, 18))
    remote = np.sin(region * 2.4) > 0.5
    slow_in_bad_weather = weather * np.where(carrier % 2 == 0, 0.4, 1.3)
    score = -2.6 + distance_km / 90 + 1.4 * rush_hour * ~remote + remote * (distance_km > 100) + slow_in_bad_weather
    score += np.where(weight_kg > 8, 0.8, 0) * (carrier != 4)
    late = rng.random(rows) < 1 / (1 + np.exp(-1.5 * score))

    weight_kg[rng.random(rows) < 0.1] = np.nan  # not every parcel was weighed
    return pa.table(
        {
            "distance_km": distance_km,
            "weight_kg": weight_kg,
            "hour": hour.astype(np.float32),
            "carrier": CARRIERS[carrier],
            "region": REGIONS[region],
            "weather": WEATHER[weather],
            "late": late.astype(np.int64),
        }
    )


def write(path: str, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for start in range(0, rows, CHUNK):
        chunk = deliveries(min(CHUNK, rows - start), rng)
        write_deltalake(path, chunk, mode="append" if start else "overwrite")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    rows = parser.parse_args().rows
    write("lake/train", rows, seed=0)
    write("lake/test", rows // 4, seed=1)
    print(f"lake/train has {rows:,} rows, lake/test {rows // 4:,}.")
