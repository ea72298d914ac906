"""A mapped table has the columns that a function computes: once, for all processes, and never those of another function."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import write_deltalake
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import footplate as fp
from footplate.core.errors import CheckpointError, ConfigError, DataError
from footplate.data import Loader, MappedTable, Table

from .mapped_functions import lengths, never, number
from .test_delta import deletion_vector, field, write_log

ROOT = Path(__file__).parents[2]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "a", "train", "leaves"]


def text(number: int) -> str:
    """Text of a document. It begins with its number."""
    rng = np.random.default_rng(number)
    return " ".join([str(number), *rng.choice(WORDS, rng.integers(0, 12)).tolist()])


def rows(start: int, stop: int) -> pa.Table:
    ids = range(start, stop)
    return pa.table({"id": pa.array(ids, pa.int64()), "text": [text(number) for number in ids]})


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """100 documents in two files, in row groups of ten."""
    path = tmp_path / "documents"
    path.mkdir()
    for part in range(2):
        pq.write_table(rows(50 * part, 50 * part + 50), path / f"{part}.parquet", row_group_size=10)
    return str(path)


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["[UNK]", "[EOS]"], show_progress=False)
    tokenizer.train_from_iterator([text(number) for number in range(100)], trainer)
    return tokenizer


def tokenize_with(tokenizer: Tokenizer) -> Callable[[dict[str, list[Any]]], dict[str, Any]]:
    def tokenize(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {"tokens": [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]}

    return tokenize


def column(table: Table, name: str) -> list[Any]:
    groups = range(len(table.row_groups))
    return [value for group in groups for value in table.read_group(group, [name])[name].to_pylist()]


def results_of(cache: Path) -> list[Path]:
    """The files of the results, row group by row group."""
    return sorted(path for path in cache.glob("mapped-*/*") if path.name.isdigit())


# The rows


def test_rows_keep_their_order_and_addresses(parquet: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = Table(parquet, columns=["text"]).map(tokenize_with(tokenizer), tmp_path / "cache")
    assert isinstance(table, MappedTable)
    assert (table.columns, table.num_rows) == (["tokens"], 100)
    assert column(table, "tokens") == [tokenizer.encode(text(number)).ids for number in range(100)]
    every = np.array([[group, row] for group in range(10) for row in range(10)])
    assert table.addresses(every) == Table(parquet).addresses(every)
    assert table.head(3)["tokens"].to_pylist() == column(table, "tokens")[:3]


def test_the_other_columns_can_be_selected_beside_the_computed_ones(parquet: str, tmp_path: Path) -> None:
    table = Table(parquet).map(lengths, tmp_path / "cache").select(["id", "length"])
    batch = next(iter(Loader(table, 100)))
    assert batch["length"].tolist() == [len(text(number)) for number in batch["id"].tolist()]


def test_deleted_and_filtered_rows_are_not_computed(tmp_path: Path) -> None:
    pq.write_table(rows(0, 40).select(["id"]), tmp_path / "a.parquet", row_group_size=30)
    deleted = {"deletionVector": deletion_vector([0, 5, 31]), "stats": json.dumps({"numRecords": 40})}
    features, configuration = ["deletionVectors"], {"delta.enableDeletionVectors": "true"}
    write_log(tmp_path, features, configuration, [field("id")], [{"path": "a.parquet", **deleted}])
    documents = Table(tmp_path, filter=[("id", "!=", 20)])

    def checked(batch: dict[str, list[Any]]) -> dict[str, Any]:
        assert not {0, 5, 20, 31} & {*batch["id"]}
        return {"number": batch["id"]}

    table = documents.map(checked, tmp_path / "cache")
    assert column(table, "number") == [n for n in range(40) if n not in (0, 5, 20, 31)]
    assert table.nulls("number") == 0
    assert next(iter(Loader(table.select(["id", "number"]), 36)))["id"].tolist() == column(table, "number")
    selected = np.array([[0, row] for row in range(27)] + [[1, row] for row in range(9)])
    assert table.addresses(selected) == documents.addresses(selected)


@pytest.mark.parametrize("key", [None, "id"])
def test_a_split_after_mapping_is_the_split_before_it(parquet: str, tmp_path: Path, key: str | None) -> None:
    documents = Table(parquet)
    before = documents.split({"train": 0.6, "val": 0.4}, key=key)
    after = documents.map(number, tmp_path / "cache").split({"train": 0.6, "val": 0.4}, key=key)
    for name, part in before.items():
        assert column(after[name], "number") == column(part, "id")


def test_tokens_are_packed_and_mixed_like_those_of_any_table(
    parquet: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    table = Table(parquet, columns=["text"]).map(tokenize_with(tokenizer), tmp_path / "cache")
    stored = Table(pa.table({"tokens": column(table, "tokens")}))
    packed = table.pack(32)
    assert sum(int((batch["document_ids"] > 0).sum()) for batch in Loader(packed, 4, shuffle=True)) == sum(
        map(len, column(stored, "tokens"))
    )
    batch = next(iter(fp.MixedLoader({"a": packed, "b": stored.pack(32)}, 4, weights={"a": 1, "b": 1})))
    assert batch["table_ids"].tolist() == [0, 0, 1, 1]


def test_a_mapped_table_can_be_mapped_again(parquet: str, tmp_path: Path) -> None:
    once = Table(parquet).map(lengths, tmp_path / "cache")
    twice = once.map(lambda batch: {"double": [2 * n for n in batch["length"]]}, tmp_path / "cache")
    assert column(twice, "double") == [2 * len(text(number)) for number in range(100)]
    assert column(Table.reopen(twice.record()), "double") == column(twice, "double")


def test_lists_without_items_have_the_type_of_the_others(parquet: str, tmp_path: Path) -> None:
    def sparse(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            "x": [[number] if number >= 95 else [] for number in batch["id"]],
            "y": [None if n < 20 else n for n in batch["id"]],
        }

    table = Table(parquet).map(sparse, tmp_path / "cache")
    assert table.schema.field("x").type == pa.list_(pa.int64())
    assert column(table, "x") == [[number] if number >= 95 else [] for number in range(100)]
    assert (table.nulls("y"), column(table, "y")[19:21]) == (20, [None, 20])


def test_arrays_and_tensors_are_columns(parquet: str, tmp_path: Path) -> None:
    def arrays(batch: dict[str, list[Any]]) -> dict[str, Any]:
        ids = np.array(batch["id"], np.int32)
        grid = np.stack([ids, ids + 1], axis=1)
        return {"array": ids, "grid": grid, "arrow": pa.array(ids), "rows": [*grid]}

    table = Table(parquet).map(arrays, tmp_path / "cache")
    batch = next(iter(Loader(table, 2)))
    assert batch["grid"].tolist() == batch["rows"].tolist() == [[0, 1], [1, 2]]
    assert table.schema.field("array").type == table.schema.field("arrow").type == pa.int32()


def test_a_batch_is_a_limited_part_of_a_row_group(tmp_path: Path) -> None:
    def counted(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {"rows": [len(batch["text"])] * len(batch["text"])}

    short = Table({"text": ["a"] * 2500}).map(counted, tmp_path)
    assert column(short, "rows") == [1000] * 2000 + [500] * 500
    long = Table({"text": ["a" * 2**20] * 20}).map(counted, tmp_path)
    assert max(column(long, "rows")) <= 8


# Once


def test_results_are_computed_once_and_found_later(parquet: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def call() -> Table:
        return Table(parquet, columns=["text"]).map(tokenize_with(tokenizer), tmp_path / "cache")

    table = call()
    kept = {path: path.stat().st_mtime_ns for path in results_of(tmp_path / "cache")}
    assert len(kept) == 10
    again = call()
    assert again.digest == table.digest
    assert {path: path.stat().st_mtime_ns for path in results_of(tmp_path / "cache")} == kept


def test_other_rows_columns_functions_and_tokenizers_have_results_of_their_own(
    parquet: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    documents = Table(parquet, columns=["text"])
    digests = [documents.map(tokenize_with(tokenizer), cache).digest]
    digests.append(documents.split({"a": 0.5})["a"].map(tokenize_with(tokenizer), cache).digest)
    digests.append(documents.map(lengths, cache).digest)
    tokenizer.add_tokens(["ox"])
    digests.append(documents.map(tokenize_with(tokenizer), cache).digest)
    Table(parquet).map(tokenize_with(tokenizer), cache)
    assert len(set(digests)) == 4
    assert len([*cache.glob("mapped-*")]) == 5


def test_each_version_of_a_delta_table_has_its_own_results(tmp_path: Path) -> None:
    lake, cache = tmp_path / "lake", tmp_path / "cache"
    write_deltalake(lake, rows(0, 10))
    assert column(Table(lake).map(lengths, cache), "length") == [len(text(number)) for number in range(10)]
    write_deltalake(lake, rows(10, 15), mode="append")
    table = Table(lake).map(lengths, cache)
    assert sorted(column(table, "length")) == sorted(len(text(number)) for number in range(15))
    assert column(Table(lake, version=0).map(lengths, cache), "length") == [len(text(number)) for number in range(10)]


def test_a_version_stands_for_the_function(parquet: str, tmp_path: Path) -> None:
    Table(parquet).map(lengths, tmp_path / "cache", version="1")
    never.__name__ = "lengths"
    table = Table(parquet).map(never, tmp_path / "cache", version="1")
    assert column(table, "length") == [len(text(number)) for number in range(100)]
    with pytest.raises(DataError, match="AssertionError: called"):
        Table(parquet).map(never, tmp_path / "cache", version="2")


def test_a_tokenizer_that_its_own_call_changes_counts_as_the_same(
    parquet: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[EOS]")
    for _ in range(2):
        table = Table(parquet).map(
            lambda batch: {"tokens": fast(batch["text"], truncation=True, max_length=4)["input_ids"]},
            tmp_path / "cache",
        )
    assert max(map(len, column(table, "tokens"))) == 4
    assert len([*(tmp_path / "cache").glob("mapped-*")]) == 1


def test_several_processes_compute_the_same(parquet: str, tmp_path: Path) -> None:
    one, three = (Table(parquet).map(lengths, tmp_path / str(count), num_workers=count) for count in (1, 3))
    assert one.digest == three.digest


def test_the_order_of_a_set_is_the_same_in_all_worker_processes(
    parquet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for seed in ("1", "2", "3"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        words = Table(parquet).map(
            lambda batch: {"x": [[*set(text.split())] for text in batch["text"]]}, tmp_path / seed
        )
        digests.add(words.digest)
    assert len(digests) == 1


# Other processes


def program(source: str, *arguments: Any, cache: Path, documents: str) -> subprocess.Popen[str]:
    """Starts a program with a table of documents and the name of a cache."""
    # A worker process has arguments of its own.
    head = (
        "import os, sys\nfrom footplate.data import Table\narguments = sys.argv[1:]\n"
        f"documents, cache = Table({documents!r}), {str(cache)!r}\n"
    )
    # Python takes a module that was edited within a second, to the same length, from its bytecode.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = tuple(map(str, arguments))
    command = [sys.executable, "-c", head + textwrap.dedent(source), *arguments]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


LOGGED = """
    def logged(batch):
        with open(arguments[0], "a") as log:
            log.write("".join(f"{number}\\n" for number in batch["id"]))
        BEFORE
        return {"length": [len(value) for value in batch["text"]]}

    table = documents.map(logged, cache, version="1")
    print([n for group in range(10) for n in table.read_group(group)["length"].to_pylist()], table.fingerprint)
"""


def test_a_killed_process_loses_at_most_the_row_groups_in_work(parquet: str, tmp_path: Path) -> None:
    killing = LOGGED.replace("BEFORE", "if 55 in batch['id'] and len(arguments) > 1: os.kill(os.getppid(), 9)")
    log, cache = tmp_path / "log", tmp_path / "cache"
    log.touch()
    killed = program(killing, log, "kill", cache=cache, documents=parquet)
    killed.communicate()
    assert killed.returncode == -9
    kept = {int(path.name) for path in results_of(cache)}
    assert 5 not in kept
    assert len({*range(5)} - kept) <= 1

    log.write_text("")
    output, _ = program(killing, log, cache=cache, documents=parquet).communicate()
    assert str([len(text(number)) for number in range(100)]) in output
    assert sorted(map(int, log.read_text().split())) == [n for n in range(100) if n // 10 not in kept]
    assert not [*cache.glob("mapped-*/*.new")]


def test_processes_at_once_compute_each_row_once(parquet: str, tmp_path: Path) -> None:
    log, fifo, cache = tmp_path / "log", tmp_path / "fifo", tmp_path / "cache"
    os.mkfifo(fifo)
    waiting = LOGGED.replace("BEFORE", "if 0 in batch['id']: open(arguments[1]).read()")
    first = program(waiting, log, fifo, cache=cache, documents=parquet)
    # This waits until the function of the first process reads.
    with fifo.open("w"):
        second = program(waiting, log, fifo, cache=cache, documents=parquet)
        assert second.stderr is not None
        assert "another process computes this. Waiting for it." in second.stderr.readline()
    outputs = [process.communicate()[0] for process in (first, second)]
    assert outputs[0] == outputs[1]
    assert str([len(text(number)) for number in range(100)]) in outputs[0]
    assert sorted(map(int, log.read_text().split())) == [*range(100)]


def test_an_edited_module_gives_new_results(parquet: str, tmp_path: Path) -> None:
    source = """
        sys.path.insert(0, arguments[0])
        import helpers
        table = documents.map(lambda batch: {"n": [helpers.count(value) for value in batch["text"]]}, cache)
        print(table.read_group(0)["n"].to_pylist())
    """
    outputs = []
    for offset in (0, 1, 0):
        (tmp_path / "helpers.py").write_text(f"OFFSET = {offset}\ndef count(value): return len(value) + OFFSET\n")
        outputs.append(program(source, tmp_path, cache=tmp_path / "cache", documents=parquet).communicate()[0].strip())
    expected = [str([len(text(number)) + offset for number in range(10)]) for offset in (0, 1, 0)]
    assert outputs == expected
    assert len([*(tmp_path / "cache").glob("mapped-*")]) == 2


def test_classes_of_a_script_are_the_same_in_a_worker_process(parquet: str, tmp_path: Path) -> None:
    source = """
        import enum, typing, attr, pydantic
        class Slotted:
            __slots__ = ("size",)
            def __init__(self): self.size = 3
        @attr.define
        class Defined: size: int = 3
        class Model(pydantic.BaseModel): size: int = 3
        class Generic(typing.Generic[typing.TypeVar("T")]): size = 3
        class Size(enum.Enum):
            THREE = 3
            size = property(lambda self: self.value)
        values = [Slotted(), Defined(), Model(), Generic(), Size.THREE]
        for n in range(len(values)):
            def sizes(batch, value=values[n]): return {"x": [value.size for _ in batch["id"]]}
            print(documents.map(sizes, cache).read_group(0)["x"][0].as_py())
    """
    output, errors = program(source, cache=tmp_path / "cache", documents=parquet).communicate()
    assert output.split() == ["3"] * 5, errors


def test_a_function_that_a_worker_process_cannot_load_is_an_error_that_says_what_to_do(
    parquet: str, tmp_path: Path
) -> None:
    source = """
        import functools
        @functools.lru_cache
        def count(value): return len(value)
        documents.map(lambda batch: {"n": [count(value) for value in batch["text"]]}, cache)
    """
    _, errors = program(source, cache=tmp_path / "cache", documents=parquet).communicate()
    assert "DataError: The function can't be loaded in a worker process (Can't get attribute 'count'" in errors
    assert "Move what it uses to a module that your script imports" in errors


def test_an_object_that_was_changed_in_a_module_is_refused(parquet: str, tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("WORDS = []\ndef count(value): return len(WORDS)\n")
    source = """
        sys.path.insert(0, arguments[0])
        import helpers
        helpers.WORDS.append("a")
        documents.map(lambda batch: {"n": [helpers.count(value) for value in batch["text"]]}, cache)
    """
    _, errors = program(source, tmp_path, cache=tmp_path / "cache", documents=parquet).communicate()
    assert "The function is another one in a new process." in errors
    assert not results_of(tmp_path / "cache")


def test_a_full_disk_is_one_error_and_the_results_so_far_are_kept(tmp_path: Path) -> None:
    documents = tmp_path / "documents.parquet"
    pq.write_table(rows(0, 40), documents, row_group_size=10)
    source = """
        import resource
        LIMIT = int(arguments[0])
        # Files can't be larger than this: results of the last row group don't fit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
        bits = lambda n: [n * 2654435761 % 2**31 + k * 7919 for k in range(3000 if n >= 30 else 3)]
        documents.map(lambda batch: {"x": [bits(n) for n in batch["id"]]}, cache, version="1")
    """
    full = program(source, 20000, cache=tmp_path / "cache", documents=str(documents))
    _, errors = full.communicate()
    assert full.returncode == 1
    assert "DataError: cache=" in errors
    assert "File too large" in errors
    assert [path.name for path in results_of(tmp_path / "cache")] == ["00000000", "00000001", "00000002"]
    again = program(source, 10**9, cache=tmp_path / "cache", documents=str(documents))
    assert "4 row groups, 40 rows" in again.communicate()[1]
    assert again.returncode == 0


def test_a_worker_that_dies_is_an_error_that_says_what_to_do(parquet: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"A worker process of map\(<lambda>\) has died \(SIGKILL\).*start again to go on"
    ):
        Table(parquet).map(lambda batch: os.kill(os.getpid(), 9), tmp_path / "cache", version="1")


# Damage


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_file_is_an_error_and_then_computed_again(parquet: str, tmp_path: Path) -> None:
    table = Table(parquet).map(lengths, tmp_path / "cache")
    expected = column(table, "length")
    damaged(results_of(tmp_path / "cache")[3])
    with pytest.raises(DataError, match=r"0\.parquet, row group 3: the computed columns.*are damaged or gone"):
        column(table, "length")
    again = Table(parquet).map(lengths, tmp_path / "cache")
    assert column(again, "length") == expected
    assert again.digest == table.digest


def test_files_that_are_cut_off_gone_or_of_another_row_group_are_computed_again(parquet: str, tmp_path: Path) -> None:
    expected = column(Table(parquet).map(lengths, tmp_path / "cache"), "length")
    files = results_of(tmp_path / "cache")
    files[1].write_bytes(files[1].read_bytes()[:-9])
    files[2].unlink()
    assert column(Table(parquet).map(lengths, tmp_path / "cache"), "length") == expected

    for path in files:
        path.write_bytes(files[0].read_bytes())
    (files[0].parent / "complete").unlink()
    assert column(Table(parquet).map(lengths, tmp_path / "cache"), "length") == expected


def test_a_damaged_description_is_made_again_from_the_results(parquet: str, tmp_path: Path) -> None:
    table = Table(parquet).map(lengths, tmp_path / "cache", version="1")
    (complete,) = (tmp_path / "cache").glob("mapped-*/complete")
    damaged(complete)
    never.__name__ = "lengths"
    again = Table(parquet).map(never, tmp_path / "cache", version="1")
    assert again.digest == table.digest
    assert again.row_groups == table.row_groups


def test_a_function_that_does_not_repeat_its_results_is_found_out(parquet: str, tmp_path: Path) -> None:
    def process(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {"pid": [os.getpid() for _ in batch["id"]]}

    first, second = (Table(parquet).map(process, tmp_path / name, version="1") for name in "ab")
    # Two machines would compute different values, so ranks that compare the digests stop.
    assert first.digest != second.digest
    results_of(tmp_path / "a")[3].unlink()
    with pytest.raises(DataError, match=r"row group 3, row 0: map\(process\) returned other values than before"):
        Table(parquet).map(process, tmp_path / "a", version="1")


# Resuming


class Regression(fp.Module):
    """Keeps the lengths of the rows that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["number"].tolist())
        return self.layer(batch["number"][:, None].float() / 100).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(parquet: str, cache: Path) -> Table:
    return Table(parquet).map(number, cache)


def train(table: Table, directory: Path, max_steps: int, **options: Any) -> list[list[int]]:
    module = Regression()
    trainer = fp.Trainer(
        accelerator="cpu", max_steps=max_steps, default_root_dir=directory, enable_progress_bar=False, logger=False
    )
    trainer.fit(module, Loader(table, 8, shuffle=True, seed=3), **options)
    return module.seen


def test_a_run_resumes_on_exact_rows_and_its_rows_are_those_of_the_files(parquet: str, tmp_path: Path) -> None:
    whole = train(numbers(parquet, tmp_path / "cache"), tmp_path / "whole", 12)
    begun = train(numbers(parquet, tmp_path / "cache"), tmp_path / "run", 5)
    # The cache of another machine is empty.
    resumed = train(numbers(parquet, tmp_path / "other"), tmp_path / "run", 12, ckpt_path="last")
    assert begun + resumed == whole
    for step in (2, 9):
        named = fp.rows(tmp_path / "run", step).rows
        assert [pq.read_table(row.file)["id"][row.row_in_file].as_py() for row in named] == whole[step - 1]


def test_a_run_does_not_resume_with_the_results_of_another_function(parquet: str, tmp_path: Path) -> None:
    train(numbers(parquet, tmp_path / "cache"), tmp_path / "run", 5)
    other = Table(parquet).map(lambda batch: {"number": [n + 1 for n in batch["id"]]}, tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"other rows.*the same function to Table\.map"):
        train(other, tmp_path / "run", 12, ckpt_path="last")


def test_packed_documents_of_a_step_are_named(parquet: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = Table(parquet, columns=["text"]).map(tokenize_with(tokenizer), tmp_path / "cache")
    packed = table.split({"train": 0.8})["train"].pack(32)
    again = Table.reopen(packed.record())
    assert again.digest == packed.digest
    (first, *_) = again.addresses(np.array([[0, 0]]))
    tokens = tokenizer.encode(pq.read_table(first.file)["text"][first.row_in_file].as_py()).ids
    assert again.read_group(0)["tokens"][0][0].as_py() == tokens[first.start : first.stop]  # type: ignore[attr-defined]


def test_a_record_without_its_results_says_what_to_do(parquet: str, tmp_path: Path) -> None:
    table = numbers(parquet, tmp_path / "cache")
    record = table.record()
    assert column(Table.reopen(record), "number") == [*range(100)]
    (tmp_path / "cache").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=r"aren't in .*cache.*Call Table\.map again, and pass the table: table="):
        Table.reopen(record)


def test_a_pickled_table_reads_the_same_results(parquet: str, tmp_path: Path) -> None:
    table = numbers(parquet, tmp_path / "cache").split({"a": 0.5})["a"]
    again = pickle.loads(pickle.dumps(table))
    assert isinstance(again, MappedTable)
    assert column(again, "number") == column(table, "number")
    assert again.digest == table.digest


# Mistakes


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("[1]", r"returned list. Expected a dict of columns"),
        ("{'x': 1}", "returned int as column 'x'. Expected a list or an array"),
        ("{'x': [1, 2]}", "returned 2 values of column 'x' for 10 rows. Expected one for each row"),
        ("{'x': [1] * 9 + ['a']}", r"Column 'x' of the function's result can't be kept"),
        (
            "{'x': [batch['id'][0] / 2 if batch['id'][0] else 1] * 10}",
            r"row group 1, row 0 .*different types in one column",
        ),
        ("{'x' if batch['id'][0] else 'y': batch['id']}", r"row group 1, row 0.*returned columns x, and before y"),
        ("{'x': [1 // (n - 55) for n in batch['id']]}", r"1\.parquet, row group 0, row 0.*ZeroDivisionError: .*zero"),
    ],
)
def test_a_result_that_does_not_fit_is_an_error_that_names_the_rows(
    parquet: str, tmp_path: Path, result: str, says: str
) -> None:
    function = eval(f"lambda batch: {result}")
    with pytest.raises(DataError, match=says):
        Table(parquet).map(function, tmp_path / "cache")


def test_an_error_shows_where_it_was_raised(parquet: str, tmp_path: Path) -> None:
    def broken(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {"x": [1 // (n - 12) for n in batch["id"]]}

    with pytest.raises(DataError, match=r"row group 1, row 0 .*map\(broken\) failed") as caught:
        Table(parquet).map(broken, tmp_path / "cache")
    assert "in broken" in "".join(getattr(caught.value.__cause__, "__notes__", []))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"function": 3}, r"map\(3\): expected a function of a batch"),
        ({"version": ""}, "version=''"),
        ({"version": 2}, "version=2: expected a text"),
        ({"num_workers": 0}, "num_workers=0: expected an integer of at least 1"),
        ({"cache": "s3://lake/cache"}, "cache='s3://lake/cache': expected a directory on a local disk"),
        ({"function": lambda batch: open("x")}, r"map\(<lambda>\).*reads files.*version=\"…\""),  # noqa: SIM115, PTH123
    ],
)
def test_arguments_that_cannot_be_are_refused(parquet: str, tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Table(parquet).map(**{"function": lengths, "cache": tmp_path / "cache", **options})
    assert not (tmp_path / "cache").exists()


def test_tables_that_cannot_be_mapped_are_refused(parquet: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no row is selected, so map\(lengths\) has no columns"):
        Table(parquet, filter=[("id", "<", 0)]).map(lengths, tmp_path / "cache")
    with pytest.raises(ConfigError, match="Map the documents, and pack the result"):
        Table({"tokens": [[1]]}).pack(4).map(lengths, tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache=.*can't be used.*writable local directory"):
        Table(parquet).map(lengths, tmp_path / "file")
