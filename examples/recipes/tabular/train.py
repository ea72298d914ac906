"""Train a network on the table of deliveries, and compare it with boosted trees of scikit-learn.

    python data.py && python train.py

If the training was interrupted, start it again: it continues. Delete runs/tabular to begin from scratch.
"""

import numpy as np
from model import TabularNet
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

import footplate as fp

NUMBERS = ["distance_km", "weight_kg", "hour"]
CATEGORIES = ["carrier", "region", "weather"]
LABEL = "late"
RUN = "runs/tabular"


def category_values(table: fp.Table) -> dict[str, list[str]]:
    """The values of each category, sorted."""
    rows = table.select(CATEGORIES).head(table.num_rows)
    return {name: sorted(rows[name].unique().drop_null().to_pylist()) for name in CATEGORIES}


def with_ids(table: fp.Table, values: dict[str, list[str]]) -> fp.Table:
    """Replace each category by an id from 1 on. A value that `values` lacks gets 0, and so does null."""
    ids = {name: {value: place for place, value in enumerate(values[name], 1)} for name in CATEGORIES}

    def encode(batch: dict[str, list[str]]) -> dict[str, list[int]]:
        return {f"{name}_id": [ids[name].get(value, 0) for value in batch[name]] for name in CATEGORIES}

    # The ids are computed once, and kept in this directory.
    encoded = table.map(encode, cache="cache")
    return encoded.select([*NUMBERS, *(f"{name}_id" for name in CATEGORIES), LABEL])


def arrays(table: fp.Table) -> dict[str, np.ndarray]:
    """All rows in memory, by column."""
    rows = table.head(table.num_rows)
    return {name: rows[name].to_numpy() for name in rows.column_names}


def baseline(train: dict[str, np.ndarray], test: dict[str, np.ndarray]) -> np.ndarray:
    """The probabilities of histogram gradient boosting, which needs all rows in memory."""
    columns = [name for name in train if name != LABEL]
    trees = HistGradientBoostingClassifier(categorical_features=[name.endswith("_id") for name in columns])
    trees.fit(np.stack([train[name] for name in columns], 1), train[LABEL])
    return trees.predict_proba(np.stack([test[name] for name in columns], 1))[:, 1]


def print_metrics(name: str, label: np.ndarray, probability: np.ndarray) -> None:
    accuracy = accuracy_score(label, probability > 0.5)
    area, loss = roc_auc_score(label, probability), log_loss(label, probability)
    print(f"{name:20}{accuracy:10.4f}{area:10.4f}{loss:10.4f}")


def main() -> None:
    fp.seed_everything(1)  # every process then makes the same model
    source = fp.Table("lake/train")
    values = category_values(source)
    train, test = with_ids(source, values), with_ids(fp.Table("lake/test"), values)
    rows = arrays(train)
    model = TabularNet(
        numbers={name: (float(np.nanmean(rows[name])), float(np.nanstd(rows[name]))) for name in NUMBERS},
        categories={f"{name}_id": len(values[name]) + 1 for name in CATEGORIES},
        label=LABEL,
    )

    parts = train.split({"train": 0.95, "val": 0.05})
    data = fp.TableDataModule(train=parts["train"], val=parts["val"], predict=test, batch_size=512)
    best = fp.ModelCheckpoint(monitor="val_loss")
    stop = fp.EarlyStopping(monitor="val_loss", patience=3)
    trainer = fp.Trainer(max_epochs=8, callbacks=[best, stop], default_root_dir=RUN)
    trainer.fit(model, data, ckpt_path="last")
    predictions = trainer.predict(datamodule=data, output=f"{RUN}/predictions")

    if trainer.is_global_zero:
        # Several processes write the predictions in another order than that of the table. So they have their own labels.
        predicted, test_rows = arrays(predictions), arrays(test)
        print(f"{'':20}{'accuracy':>10}{'ROC AUC':>10}{'log loss':>10}")
        print_metrics("this network", predicted["label"], predicted["probability"])
        print_metrics("boosted trees", test_rows[LABEL], baseline(rows, test_rows))


if __name__ == "__main__":
    main()
