"""Train from a Spark DataFrame: compute features in Spark, write a Delta table, pin its version, and resume the run.

It needs PySpark and Java. Spark passes its rows to Delta through Arrow here, because its own Delta package is a download.
The same line opens a table that Spark has written.

    python examples/lakehouse.py
"""

import torch
from deltalake import write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from torch import nn

import footplate as fp

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
rides = spark.range(20_000, numPartitions=4).select(
    sql.col("id").alias("ride"),
    (sql.col("id") % 500).alias("driver"),
    sql.rand(1).cast("float").alias("distance"),
    sql.rand(2).cast("float").alias("traffic"),
)
rides = rides.withColumn("minutes", (30 * sql.col("distance") * (1 + sql.col("traffic"))).cast("float"))
write_deltalake("lake/rides", rides.toArrow())  # version 0
write_deltalake("lake/rides", rides.withColumn("minutes", sql.lit(0.0).cast("float")).toArrow(), mode="append")
spark.stop()


class Minutes(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def error(self, batch):  # mean absolute error in minutes
        features = torch.stack([batch["distance"], batch["traffic"]], dim=1)
        return (self.net(features).squeeze(1) - batch["minutes"]).abs().mean()

    def training_step(self, batch, batch_idx):
        return self.error(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_error", self.error(batch), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


fp.seed_everything(1)
table = fp.Table("lake/rides", version=0)  # without the second write, which was a mistake
data = fp.TableDataModule(table, batch_size=128, split={"train": 0.9, "val": 0.1}, split_key="driver")
for epochs in (2, 6):  # the second run continues where the first one ended
    trainer = fp.Trainer(max_epochs=epochs, default_root_dir="runs/rides", enable_model_summary=False)
    trainer.fit(Minutes(), data, ckpt_path="last")
    error = trainer.callback_metrics["val_error"]
    print(f"version {table.version}: off by {error:.2f} minutes after {trainer.global_step} steps")
