"""Petastorm's names over Footplate's tables: existing code runs with its import line changed.

    from footplate.compat.petastorm import SparkDatasetConverter, TransformSpec, make_spark_converter

    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "file:///dbfs/tmp/cache")
    converter = make_spark_converter(df)
    with converter.make_torch_dataloader(batch_size=64, transform_spec=TransformSpec(f), num_epochs=1) as loader:
        for batch in loader:
            ...

The same as in Petastorm: names, arguments, context managers, transforms of pandas frames, float64 as float32, no end of
epochs by default. `make_reader` decodes the columns of a table that `materialize_dataset` wrote (unischema.py), and
`predicate=` chooses rows (predicates.py).

Better than in Petastorm: every shard has the same number of batches, no row is lost or repeated, the order depends only on
the seed, and a Delta table is read by its log.

Not supported: n-grams, TensorFlow, and worker processes (threads are used, whatever the pool's type). An argument that
would change rows or batches is refused by name. docs/reference/petastorm.md lists the differences.
"""

from footplate.compat.petastorm.converter import (
    SparkDatasetConverter,
    make_spark_converter,
    register_delete_dir_handler,
)
from footplate.compat.petastorm.loaders import BatchedDataLoader, BatchLoader, DataLoader, InMemBatchedDataLoader
from footplate.compat.petastorm.predicates import (
    PredicateBase,
    in_intersection,
    in_lambda,
    in_negate,
    in_pseudorandom_split,
    in_reduce,
    in_set,
)
from footplate.compat.petastorm.readers import Reader, make_batch_reader, make_reader
from footplate.compat.petastorm.rows import decimal_friendly_collate
from footplate.compat.petastorm.transforms import TransformSpec, edit_field
from footplate.compat.petastorm.unischema import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NdarrayCodec,
    ScalarCodec,
    Unischema,
    UnischemaField,
)

__all__ = [
    "BatchLoader", "BatchedDataLoader", "CompressedImageCodec", "CompressedNdarrayCodec", "DataLoader",
    "InMemBatchedDataLoader", "NdarrayCodec", "PredicateBase", "Reader", "ScalarCodec", "SparkDatasetConverter",
    "TransformSpec", "Unischema", "UnischemaField", "decimal_friendly_collate", "edit_field", "in_intersection",
    "in_lambda", "in_negate", "in_pseudorandom_split", "in_reduce", "in_set", "make_batch_reader", "make_reader",
    "make_spark_converter", "register_delete_dir_handler",
]  # fmt: skip
