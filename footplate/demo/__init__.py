"""The demo: `footplate demo` trains a small image classifier straight from a Delta table, on any machine.

The demo has all parts that a user of Footplate writes: a module (`model.py`), two tables (`fashion_mnist/train` and
`fashion_mnist/val`) and a trainer (`run.py`). `results.py` makes the table of
predictions and the summary, and `fp.report` the report. `make_table.py` has made the tables.
"""

from pathlib import Path

TABLES = Path(__file__).parent / "fashion_mnist"
"""The folder of the demo's two Delta tables, `train` and `val`."""

LABEL_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""The ten classes of Fashion-MNIST, in the order of their labels."""
