"""Make three Delta tables of a shop: items, the purchases to train on, and each user's last purchase, to test on.

    python data.py                                  # 2,000 users, 1,000 items, 20 purchases of each user
    python data.py --users 1000000 --items 100000

To use tables of your own, write the same columns: user and item are integers from 0 on, category is a property of an item.
"""

import argparse

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

TASTES = 8
PURCHASES = 20  # of each user; the last one is for the test
CANDIDATES = 200  # items that a user looks at before a purchase


def purchases(users: int, items: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw what each user buys: popular items of the user's taste.

    Returns the items that are bought (users, PURCHASES), and the category of each item (items,).
    """
    category = rng.integers(0, 20, items)
    category_styles = rng.normal(size=(20, TASTES))
    styles = category_styles[category] + 0.7 * rng.normal(size=(items, TASTES))
    popularity = rng.gumbel(size=items)
    bought = np.empty((users, PURCHASES), np.int64)
    for user in range(users):
        taste = rng.normal(size=TASTES)
        seen = rng.choice(items, min(CANDIDATES, items), replace=False)
        scores = 1.2 * styles[seen] @ taste + popularity[seen] + rng.gumbel(size=len(seen))
        best = np.argpartition(-scores, PURCHASES)[:PURCHASES]
        bought[user] = rng.permutation(seen[best])
    return bought, category


def pairs(bought: np.ndarray, category: np.ndarray) -> pa.Table:
    users, count = bought.shape
    item = bought.reshape(-1)
    return pa.table({"user": np.repeat(np.arange(users), count), "item": item, "category": category[item]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=1000)
    args = parser.parse_args()
    bought, category = purchases(args.users, args.items, np.random.default_rng(0))
    write_deltalake("lake/items", pa.table({"item": np.arange(args.items), "category": category}), mode="overwrite")
    write_deltalake("lake/train", pairs(bought[:, :-1], category), mode="overwrite")
    write_deltalake("lake/test", pairs(bought[:, -1:], category), mode="overwrite")
    print(f"{args.users:,} users bought {bought.size:,} times from {args.items:,} items.")
