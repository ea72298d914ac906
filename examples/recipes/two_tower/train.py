"""Train two towers on purchases, and recommend items: recall@k, beside the recommendation of what is popular.

    python data.py && python train.py

If the training was interrupted, start it again: it continues. Delete runs/two_tower to begin from scratch.
"""

import numpy as np
import torch
from model import TwoTower

import footplate as fp

RUN = "runs/two_tower"
TOP = (10, 50)


def arrays(path: str) -> dict[str, np.ndarray]:
    """All rows of a table in memory, by column."""
    table = fp.Table(path)
    rows = table.head(table.num_rows)
    return {name: rows[name].to_numpy() for name in rows.column_names}


def recalls(scores: torch.Tensor, train: dict[str, np.ndarray], test: dict[str, np.ndarray]) -> list[float]:
    """The share of test purchases among the k best items that the user hasn't bought before, for each k of TOP.

    Args:
        scores: (users, items). They are changed.
        train: the purchases to leave out.
        test: a purchase of each user.
    """
    scores.numpy()[train["user"], train["item"]] = -np.inf
    best = scores.topk(max(TOP)).indices.numpy()  # (users, max(TOP))
    hits = best[test["user"]] == test["item"][:, None]
    return [float(hits[:, :k].any(1).mean()) for k in TOP]


def main() -> None:
    fp.seed_everything(1)  # every process then makes the same model
    items, train, test = arrays("lake/items"), arrays("lake/train"), arrays("lake/test")
    users = int(max(train["user"].max(), test["user"].max())) + 1
    counts = np.bincount(train["item"], minlength=len(items["item"]))
    model = TwoTower(users, share=list(counts / counts.sum()), categories=int(items["category"].max()) + 1)

    data = fp.TableDataModule(train="lake/train", batch_size=512)
    trainer = fp.Trainer(max_epochs=15, default_root_dir=RUN)
    trainer.fit(model, data, ckpt_path="last")

    if trainer.is_global_zero:
        with torch.no_grad():
            vectors = model.item_vectors({name: torch.tensor(items[name]) for name in ("item", "category")})
            scores = model.user_vectors({"user": torch.arange(users)}) @ vectors.T
        popular = torch.from_numpy(counts).float().repeat(users, 1)
        print(f"{'':16}" + "".join(f"{f'recall@{k}':>12}" for k in TOP))
        for name, found in (("two towers", scores), ("popular items", popular)):
            print(f"{name:16}" + "".join(f"{recall:12.4f}" for recall in recalls(found, train, test)))


if __name__ == "__main__":
    main()
