"""`fp.rows` names the rows that the module has seen."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from torch.utils.data import DataLoader

import footplate as fp
from footplate.cli.rows import run as command
from replaying.programs import ROWS, Seeing, columns, rows, seeing, trainer


@pytest.fixture
def delta(tmp_path: Path) -> str:
    """150 rows in three files."""
    path = str(tmp_path / "lake")
    for start in range(0, ROWS, 50):
        write_deltalake(path, rows(start, start + 50), mode="append")
    return path


def ids_named(run: Path, step: int, table: fp.Table | None = None) -> dict[int, list[int]]:
    """The ids of the named rows, read from their files, for each rank."""
    named, ids = fp.rows(run, step, table).rows, defaultdict(list)
    of_files = {file: pq.read_table(file, columns=["id"])["id"] for file in {row.file for row in named}}
    for row in named:
        ids[row.rank].append(of_files[row.file][row.row_in_file].as_py())
    return dict(ids)


def check(run: Path, module: Seeing) -> None:
    """Compare the named rows of every step with those that the module has seen."""
    assert module.ids
    for step, batches in module.ids.items():
        assert ids_named(run, step) == {0: [row_id for batch in batches for row_id in batch]}


@pytest.mark.parametrize("seed", range(4))
def test_the_rows_of_every_step_of_a_random_run_are_named(tmp_path, delta, seed):
    g = np.random.default_rng(seed)
    DeltaTable(delta).delete("id % 7 = 3")
    table = fp.Table(delta, filter=[[("id", "<", 60)], [("a", ">", -1.0)]] if g.random() < 0.5 else None)
    if g.random() < 0.7:
        table = table.split({"train": 0.7, "val": 0.3}, seed=seed)["train"]
    loader = fp.Loader(
        table, int(g.integers(3, 12)), shuffle=bool(seed % 2), seed=seed, drop_last=bool(g.random() < 0.5)
    )
    limit = int(g.integers(4, 9)) if g.random() < 0.5 else None
    settings = {"accumulate_grad_batches": int(g.integers(1, 4)), "limit_train_batches": limit}

    # Three attempts, of which two end in the middle.
    module = seeing()
    for stop in (int(g.integers(2, 5)), int(g.integers(5, 9)), -1):
        module = seeing() if stop != -1 else module
        attempt = seeing()
        attempt.ids = module.ids
        trainer(tmp_path / "run", max_steps=stop, **settings).fit(attempt, loader, ckpt_path="last")
        module = attempt
    check(tmp_path / "run", module)


def test_every_rank_has_its_rows_and_fewer_ranks_continue(tmp_path, delta):
    loader = fp.Loader(fp.Table(delta), 6, shuffle=True, seed=1)
    run, seen = tmp_path / "run", tmp_path / "seen"
    seen.mkdir()
    trainer(run, devices=2, max_epochs=1, accumulate_grad_batches=2).fit(seeing(directory=seen), loader)
    alone = seeing()
    trainer(run, devices=1, max_epochs=2, accumulate_grad_batches=2).fit(
        alone, fp.Loader(fp.Table(delta), 12, shuffle=True, seed=1), ckpt_path="last"
    )

    expected = defaultdict(lambda: defaultdict(list))
    for rank in range(2):
        for line in (seen / f"rank-{rank}").read_text().splitlines():
            noted = json.loads(line)
            expected[noted["step"]][rank] += noted["ids"]
    for step, batches in alone.ids.items():
        expected[step][0] += [row_id for batch in batches for row_id in batch]
    assert max(expected) == 14
    for step, of_ranks in expected.items():
        assert ids_named(run, step) == dict(of_ranks)


def test_rows_of_similar_length_are_named_and_other_lengths_are_an_error(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 50, ROWS)
    given = rows().append_column("text", pa.array(["x" * length for length in lengths]))
    pq.write_table(given, tmp_path / "rows.parquet", row_group_size=40)
    loader = fp.Loader(fp.Table(tmp_path / "rows.parquet"), 7, shuffle=True, group_by_length="text")
    first, module = seeing(), seeing()
    trainer(tmp_path / "run", max_steps=12).fit(first, loader)
    module.ids = first.ids
    trainer(tmp_path / "run").fit(module, loader, ckpt_path="last")
    check(tmp_path / "run", module)

    # The digest of a Parquet file knows its size and footer, and not its values.
    other = fp.Table(given.set_column(3, "text", pa.array(["x"] * ROWS)))
    other.check_rows = lambda digest: None
    with pytest.raises(fp.DataError, match="other lengths in the column 'text' than in the run"):
        fp.rows(tmp_path / "run", 1, other)


def test_a_newer_version_of_the_table_does_not_matter(tmp_path, delta):
    module = seeing()
    trainer(tmp_path / "run").fit(module, fp.Loader(fp.Table(delta), 16, shuffle=True))
    write_deltalake(delta, rows(1000, 1050), mode="overwrite")
    check(tmp_path / "run", module)
    first = fp.rows(tmp_path / "run", 1).rows[0]
    assert (first.version, Path(first.file).parent.name, first.row) == (2, "lake", first.row_in_file)

    DeltaTable(delta).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(fp.DataError, match=r"Version 2 of .* vacuumed"):
        fp.rows(tmp_path / "run", 1)
    shutil.rmtree(delta)
    with pytest.raises(fp.DataError, match="nothing at this path"):
        fp.rows(tmp_path / "run", 1)


def test_changed_files_are_an_error(tmp_path):
    pq.write_table(rows(), tmp_path / "rows.parquet", row_group_size=40)
    module = seeing()
    trainer(tmp_path / "run").fit(module, fp.Loader(fp.Table(tmp_path / "rows.parquet"), 16, shuffle=True))
    check(tmp_path / "run", module)
    assert {row.row_group for row in fp.rows(tmp_path / "run", 2).rows} == {0, 1, 2, 3}

    pq.write_table(rows(0, 120), tmp_path / "rows.parquet", row_group_size=40)
    with pytest.raises(fp.DataError, match="other rows than those of the run"):
        fp.rows(tmp_path / "run", 2)


def test_a_table_in_memory_is_passed(tmp_path):
    module, table = seeing(), fp.Table(columns(0, ROWS))
    trainer(tmp_path).fit(module, fp.Loader(table, 16, shuffle=True))
    with pytest.raises(fp.ConfigError, match="was in memory"):
        fp.rows(tmp_path, 1)
    with pytest.raises(fp.DataError, match="other rows"):
        fp.rows(tmp_path, 1, fp.Table(columns(0, 10)))
    step_rows = fp.rows(tmp_path, 12, fp.Table(columns(0, ROWS)))
    assert [row.row_in_file for row in step_rows.rows] == module.ids[12][0]
    assert (step_rows.epoch, step_rows.batches, step_rows.ranks, step_rows.planned) == (1, [1], 1, False)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_rows_of_combined_loaders(tmp_path, mode):
    tables = [fp.Table(rows(0, 40)), fp.Table(rows(100, 190))]
    for number, table in enumerate(tables):
        pq.write_table(table.read_group(0), tmp_path / f"{number}.parquet")
    loaders = [fp.Loader(fp.Table(tmp_path / f"{n}.parquet"), 8, shuffle=True, seed=n) for n in range(2)]

    class Both(Seeing):
        def training_step(self, batch, batch_idx):
            parts = [batch] if isinstance(batch, dict) else [part for part in batch if part is not None]
            joined = {name: np.concatenate([part[name] for part in parts]) for name in ("id", "a", "b")}
            return super().training_step(fp.Loader(fp.Table(joined), 99).__iter__().__next__(), batch_idx)

    module = Both()
    trainer(tmp_path / "run").fit(module, fp.CombinedLoader(loaders, mode))
    check(tmp_path / "run", module)


def test_image_files_are_named_one_by_one(tmp_path):
    import cv2

    for number in range(20):
        folder = tmp_path / "images" / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{number}.png"), np.full((4, 4, 3), number, np.uint8))

    class Pictures(Seeing):
        def training_step(self, batch, batch_idx):
            numbers = batch["image"][:, 0, 0, 0]
            return super().training_step({"id": numbers, "a": numbers.float(), "b": numbers.float()}, batch_idx)

    module = Pictures()
    trainer(tmp_path / "run").fit(module, fp.Loader(fp.Table(tmp_path / "images"), 6, shuffle=True))
    for step, (numbers,) in module.ids.items():
        assert [int(Path(row.file).stem) for row in fp.rows(tmp_path / "run", step).rows] == numbers


def test_what_cannot_be_known_is_one_clear_error(tmp_path, delta):
    module = Seeing(skips=(13,))
    trainer(tmp_path / "skipped", max_epochs=3).fit(module, fp.Loader(fp.Table(delta), 16, shuffle=True))
    for step in (1, 10, 20, 29):
        assert ids_named(tmp_path / "skipped", step) == {0: module.ids[step][0]}
    with pytest.raises(fp.ConfigError, match="In epoch 1, 10 batches made 9 steps instead of 10"):
        fp.rows(tmp_path / "skipped", 12)

    data = DataLoader([{name: value[n] for name, value in columns(0, 40).items()} for n in range(40)], 8)
    trainer(tmp_path / "torch").fit(seeing(), data)
    with pytest.raises(fp.ConfigError, match=r"came from DataLoader.*footplate replay"):
        fp.rows(tmp_path / "torch", 1)
    for step in (0, -1, 1.5, True):
        with pytest.raises(fp.ConfigError, match="at least 1"):
            fp.rows(tmp_path / "torch", step)
    with pytest.raises(fp.CheckpointError, match="nothing at"):
        fp.rows(tmp_path / "nowhere", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(fp.CheckpointError, match="no complete checkpoint"):
        fp.rows(tmp_path / "empty", 1)


def test_a_step_after_the_newest_checkpoint_is_planned(tmp_path, delta):
    loader = fp.Loader(fp.Table(delta), 16, shuffle=True)
    trainer(tmp_path / "run", max_steps=7).fit(seeing(), loader)
    ids = ids_named(tmp_path / "run", 25)
    assert fp.rows(tmp_path / "run", 25).planned
    module = seeing()
    trainer(tmp_path / "run").fit(module, loader, ckpt_path="last")
    assert ids == {0: module.ids[25][0]}


def test_a_filter_with_every_kind_of_value_is_kept(tmp_path):
    import pyarrow.compute as pc

    table = pa.table({"id": range(60), "a": np.ones(60, np.float32), "b": np.ones(60, np.float32)})
    table = table.append_column("name", pa.array([f"é{n % 5}" if n % 4 else None for n in range(60)]))
    pq.write_table(table, tmp_path / "rows.parquet")
    filter = pc.field("name").isin(["é1", "é2", "é3"]) | pc.field("name").is_null() & (pc.field("id") > 20)
    module = seeing()
    chosen = fp.Table(tmp_path / "rows.parquet", columns=["id", "a", "b"], filter=filter)
    trainer(tmp_path / "run").fit(module, fp.Loader(chosen, 8))
    check(tmp_path / "run", module)


class Reading(Seeing):
    """The same model, which notes the documents of a batch of packed sequences."""

    def training_step(self, batch, batch_idx):
        step, ids = self.trainer.global_step + 1, batch["document_ids"]
        for tokens, numbers in zip(batch["tokens"], ids, strict=True):
            pieces = [tokens[numbers == number].tolist() for number in range(1, int(numbers.max()) + 1)]
            self.ids.setdefault(step, []).append(pieces)
        return self.loss({"a": batch["tokens"][:, 0] / 1000, "b": ids[:, -1].float()})


def documents_named(run, step):
    """The named documents, read from their files, sequence by sequence."""
    named, sequences = fp.rows(run, step).rows, defaultdict(list)
    of_files = {file: pq.read_table(file, columns=["tokens"])["tokens"] for file in {row.file for row in named}}
    for row in named:
        tokens = of_files[row.file][row.row_in_file].as_py()
        sequences[row.sequence].append(tokens[row.start : row.stop])
    return list(sequences.values())


def test_documents_of_packed_sequences_are_named_after_an_interruption(tmp_path):
    g = np.random.default_rng(0)
    documents = [g.integers(1, 1000, n).tolist() for n in g.integers(1, 40, 200)]
    table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32())), "id": range(200)})
    write_deltalake(tmp_path / "lake", table)
    DeltaTable(tmp_path / "lake").delete("id % 7 = 3")
    packed = fp.Table(tmp_path / "lake", columns=["tokens"], filter=[("id", ">", 20)]).pack(16, truncate=False)

    module = Reading()
    for stop in (5, 23, -1):
        attempt = Reading()
        attempt.ids = module.ids
        loader = fp.Loader(packed, 8, shuffle=True, seed=3)
        trainer(tmp_path / "run", max_steps=stop).fit(attempt, loader, ckpt_path="last")
        module = attempt
    assert len(module.ids) == 3 * len(loader)
    for step, sequences in module.ids.items():
        assert documents_named(tmp_path / "run", step) == sequences


def test_the_command_shows_sequences_and_tokens(tmp_path, capsys):
    documents = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    pq.write_table(pa.table({"tokens": documents}), tmp_path / "documents.parquet")
    loader = fp.Loader(fp.Table(tmp_path / "documents.parquet").pack(4), 3)
    trainer(tmp_path / "run", max_epochs=1, save_every=1).fit(Reading(), loader)
    assert command("rows", [str(tmp_path / "run"), "--step", "1"]) == 0
    cells = [line.split() for line in capsys.readouterr().out.splitlines() if " to " in line]
    # Rank, batch, sequence, and at the end the tokens of the document.
    assert [(line[2], " ".join(line[-3:])) for line in cells] == [
        ("0", "0 to 3"),
        ("0", "4 to 5"),
        ("1", "0 to 4"),
        ("2", "0 to 1"),
    ]


SCHEDULE = {0: {"a": 3, "b": 1}, 5: {"a": 1, "b": 1}}


def mixture(tmp_path, batch_size=8):
    """A loader of two tables with a schedule, whose files hold the rows of `Seeing`."""
    for name, start, stop in (("a", 0, 90), ("b", 100, 140)):
        if not (tmp_path / f"{name}.parquet").exists():
            pq.write_table(rows(start, stop), tmp_path / f"{name}.parquet", row_group_size=25)
    tables = {name: fp.Table(tmp_path / f"{name}.parquet") for name in "ab"}
    return fp.MixedLoader(tables, batch_size, weights=SCHEDULE, shuffle=True, seed=5)


def test_rows_of_a_mixture_are_named_after_an_interruption(tmp_path):
    module = seeing()
    for stop in (4, 17, -1):
        attempt = seeing()
        attempt.ids = module.ids
        trainer(tmp_path / "run", max_steps=stop).fit(attempt, mixture(tmp_path), ckpt_path="last")
        module = attempt
    uninterrupted = seeing()
    trainer(tmp_path / "whole").fit(uninterrupted, mixture(tmp_path))
    assert module.ids == uninterrupted.ids
    check(tmp_path / "run", module)
    assert {(row.loader, Path(row.file).name) for row in fp.rows(tmp_path / "run", 1).rows} == {
        (0, "a.parquet"),
        (1, "b.parquet"),
    }


def test_rows_of_a_mixture_beside_another_loader_are_named(tmp_path):
    pq.write_table(rows(200, 260), tmp_path / "c.parquet")

    class Both(Seeing):
        def training_step(self, batch, batch_idx):
            joined = {name: np.concatenate([part[name] for part in batch]) for name in ("id", "a", "b")}
            return super().training_step(next(iter(fp.Loader(fp.Table(joined), 99))), batch_idx)

    module = Both()
    loaders = [fp.Loader(fp.Table(tmp_path / "c.parquet"), 8, shuffle=True), mixture(tmp_path)]
    trainer(tmp_path / "run").fit(module, fp.CombinedLoader(loaders, "max_size_cycle"))
    check(tmp_path / "run", module)
    assert {row.loader for row in fp.rows(tmp_path / "run", 1).rows} == {0, 1, 2}


def test_tables_of_a_mixture_in_memory_are_passed_by_name(tmp_path):
    tables = {"a": fp.Table(columns(0, 40)), "b": fp.Table(columns(100, 120))}
    module = seeing()
    loader = fp.MixedLoader(tables, 8, weights={"a": 1, "b": 1})
    trainer(tmp_path / "run", max_epochs=1).fit(module, loader)
    with pytest.raises(fp.ConfigError, match=r"was in memory.*table=\{'a': table, …\}"):
        fp.rows(tmp_path / "run", 1)
    with pytest.raises(fp.ConfigError, match=r"was in memory.*table=\{'b': table, …\}"):
        fp.rows(tmp_path / "run", 1, {"a": tables["a"]})
    assert [row.row for row in fp.rows(tmp_path / "run", 1, tables).rows] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_ranks_of_a_mixture_have_their_rows(tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    trainer(tmp_path / "run", devices=2, max_epochs=1).fit(seeing(directory=seen), mixture(tmp_path, 4))
    noted = [[json.loads(line) for line in (seen / f"rank-{rank}").read_text().splitlines()] for rank in range(2)]
    assert len(noted[0]) == len(noted[1]) > 5
    for step in range(1, len(noted[0]) + 1):
        assert ids_named(tmp_path / "run", step) == {rank: noted[rank][step - 1]["ids"] for rank in range(2)}
