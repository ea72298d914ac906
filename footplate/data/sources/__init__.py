"""Sources of rows: Delta, Parquet, TFRecord, image folders, frames in memory, and Spark."""
