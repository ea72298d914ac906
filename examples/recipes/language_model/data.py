"""Make Delta tables of tokens, and load them as packed sequences.

    python data.py                                      # tokens are bytes
    python data.py --tokenizer meta-llama/Llama-3.2-1B  # the tokens of a model

The texts are in Python's standard library: its docstrings for a small base model, and its functions to fine-tune on. To use
your own texts, replace `texts`.
"""

import argparse
import ast
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

import footplate as fp

MODULES = 60
LONGEST = 2000  # characters


class PackedTables(fp.TableDataModule):
    """Documents of two tables, several in each sequence.

    Args:
        train: the table to train on, with a column `tokens`.
        val: the table to validate on.
        sequence_length: the tokens of a sequence.
        batch_size: the sequences of one process's batch.
    """

    def __init__(self, train: str, val: str, sequence_length: int = 512, batch_size: int = 8) -> None:
        tables = {name: fp.Table(path).pack(sequence_length) for name, path in {"train": train, "val": val}.items()}
        super().__init__(**tables, batch_size=batch_size)


def texts() -> tuple[list[str], list[str]]:
    """The docstrings, and the functions, of some modules."""
    docstrings, functions = [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MODULES]:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                docstrings.append(ast.get_docstring(node) or "")
            if isinstance(node, ast.FunctionDef):
                functions.append("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
    return [text for text in docstrings if text], [text for text in functions if len(text) <= LONGEST]


def encoder(tokenizer: str | None) -> Callable[[str], list[int]]:
    """A function from a text to its tokens. Without a tokenizer, a token is a byte plus 1, and 257 ends a text."""
    if tokenizer is None:
        return lambda text: [byte + 1 for byte in text.encode()] + [257]
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda text: [*loaded(text)["input_ids"], loaded.eos_token_id]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer")
    encode = encoder(parser.parse_args().tokenizer)
    docstrings, functions = texts()
    parts = {
        "base": docstrings,
        "train": [text for place, text in enumerate(functions) if place % 10],
        "val": functions[::10],
    }
    for part, documents in parts.items():
        tokens = [encode(text) for text in documents]
        write_deltalake(f"lake/{part}", pa.table({"tokens": tokens}), mode="overwrite")
        print(f"lake/{part} has {len(tokens):,} documents with {sum(map(len, tokens)):,} tokens.")
