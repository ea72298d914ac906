"""Tables that Petastorm wrote with a Unischema: decoded without running the code that their pickled schema names."""

from __future__ import annotations

import base64
import datetime
import io
import pickle
import zlib
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from footplate.compat.petastorm import DataLoader, TransformSpec, edit_field, make_batch_reader, make_reader
from footplate.compat.petastorm.metadata import parse_unischema
from footplate.compat.petastorm.predicates import (
    in_intersection,
    in_lambda,
    in_negate,
    in_pseudorandom_split,
    in_reduce,
    in_set,
)
from footplate.compat.petastorm.rows import decimal_friendly_collate
from footplate.compat.petastorm.unischema import CompressedImageCodec, UnischemaField
from footplate.core.errors import ConfigError, DataError

# What Petastorm 0.13.1 writes for the schema of `write_things`, compressed.
SCHEMA = zlib.decompress(
    base64.b85decode(
        "c-m!BNpI9J6s~6NEGh*m-~tCY5H68eH0>2;R1rlARXc;kg~&-fv8l7vb_6*f(L<p~zG40^&z?+Y0H16>f6M!xzjc0pYVX*k?v_|0"
        "Aq$?lRZc}raE7!REN=F{^s`I-RXeI1<|xBj_2z`;snDt)E-7XS>_&0H7>*?^a&vme6U=ckqp>vbQvkPUqREchyWu@HP^da&th#xX"
        "m9<t~n#;*615x`MTXB)#*wCKEh#@{T$F(ap3Pp+dc_`}=tlchadvwJGbIp~3dAY<X=5zDH!bJ2_>PwIl8DdP6J%>CZx2*c}iFp!S"
        "+j?ioP-@FhpxlXyf^Aj1C8sgAWk>bF69qO1W!CKAB{{Gr$$j!bjhg$74U_4h<Zvw@H|-C>5Oj#O-%|SoiIa87%a?_|uA;T?j-7)M"
        "J~Y0B<l(<+!!yZYNZVp+V1|Uuj3AW7{P-w*;{~rzKR_NLYC8T*aBi7rz&uQl#FA!sHItx84Z28I@}5bpg4m9r?sxpQ-~OS=9d$4*"
        "GH6T)oOtH(Un6tWIJ6X@9W02tWu9ua8(vh1QCVyMq-r|tWeEECV#VHrSg%^oDDYd~jnp_u5a+1gl32CUD^Yxo6AKLi+F!B)$(JvT"
        ")Ap5t-rKnRpQK5eQ6Vh_X+DT02(I+%6I5hO9>V8&3_s*4amWNFGKK8kLNp6-{1K#6z-CqC{sAY2R*n"
    )
)
KEY = b"dataset-toolkit.unischema.v1"
PIXELS = np.arange(36, dtype=np.uint8).reshape(4, 3, 3)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, arr=array)
    return stream.getvalue()


def write_things(folder: Path, schema: bytes = SCHEMA, rows: int = 20) -> str:
    numbers = range(rows)
    times = [datetime.datetime(2020, 1, 1, 3, number, tzinfo=datetime.UTC) for number in numbers]
    columns = {
        "id": pa.array(numbers, pa.int64()),
        "small": pa.array([None if number % 2 else number for number in numbers], pa.int32()),
        "flag": pa.array([None if number == 0 else number % 3 == 0 for number in numbers]),
        "price": pa.array([Decimal(number) / 4 for number in numbers], pa.decimal128(10, 2)),
        "name": pa.array([None if number == 1 else f"n{number}" for number in numbers]),
        "when": pa.array(times, pa.timestamp("us", "UTC")),
        "image": [png(PIXELS + number) for number in numbers],
        "matrix": [None if number == 2 else npy(np.full((number, 2), 60000, np.uint16)) for number in numbers],
        "packed": [npz(np.full(3, number / 2, np.float32)) for number in numbers],
        "list": pa.array([None if n == 3 else list(range(n)) for n in numbers], pa.list_(pa.int32())),
    }
    table = pa.table(columns)
    pq.write_table(table, folder / "part-0.parquet", row_group_size=6)
    pq.write_metadata(table.schema.with_metadata({KEY: schema}), folder / "_common_metadata")
    return str(folder)


@pytest.fixture
def things(tmp_path: Path) -> str:
    return write_things(tmp_path)


def test_rows_have_the_types_and_shapes_of_the_unischema(things: str) -> None:
    with make_reader(things, shuffle_row_groups=False) as reader:
        rows = list(reader)
    assert [row.id for row in rows] == list(range(20))
    assert all(row.id.dtype == np.int64 for row in rows)
    assert [row.small for row in rows[:3]] == [0, None, 2]
    assert rows[2].small.dtype == np.int16
    assert [row.flag for row in rows[:4]] == [None, False, False, True]
    assert rows[1].flag.dtype == np.bool_
    assert rows[3].price == Decimal("0.75")
    assert [row.name for row in rows[:3]] == ["n0", None, "n2"]
    assert rows[7].when == np.datetime64("2020-01-01T03:07")
    np.testing.assert_array_equal(rows[5].image, PIXELS + 5)
    assert rows[2].matrix is None
    assert (rows[4].matrix.dtype, rows[4].matrix.shape, rows[4].matrix.min()) == (np.uint16, (4, 2), 60000)
    np.testing.assert_array_equal(rows[9].packed, np.full(3, 4.5, np.float32))
    assert rows[3].list is None
    np.testing.assert_array_equal(rows[4].list, np.arange(4, dtype=np.int32))
    assert rows[0].list.shape == (0,)


@pytest.mark.parametrize(("names", "expected"), [(["007", "010"], ["7", "10"]), (["1e3", "2"], ["1e3", "2"])])
def test_a_text_field_that_is_a_partition_has_petastorms_text(
    names: list[str], expected: list[str], tmp_path: Path
) -> None:
    """Arrow reads directory names as integers if all of them are integers. Petastorm converts them to text."""
    for name in names:
        (tmp_path / f"name={name}").mkdir()
        pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), tmp_path / f"name={name}" / "0.parquet")
    stored = pq.read_schema(tmp_path / f"name={names[0]}" / "0.parquet")
    pq.write_metadata(stored.with_metadata({KEY: SCHEMA}), tmp_path / "_common_metadata")
    rows = list(make_reader(str(tmp_path), ["id", "name"], shuffle_row_groups=False))
    assert [row.name for row in rows] == expected
    assert all(isinstance(row.name, str) for row in rows)


def test_a_row_goes_through_a_transform_as_a_dict(things: str) -> None:
    def double(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "id": row["id"] * 2}

    spec = TransformSpec(double, removed_fields=["image"])
    rows = list(make_reader(things, ["id", "image"], transform_spec=spec, shuffle_row_groups=False))
    assert [row._asdict() for row in rows[:2]] == [{"id": 0}, {"id": 2}]


def test_edit_fields_states_type_and_shape_of_a_rows_columns(things: str) -> None:
    def add(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "half": row["id"] / 2, "pair": [row["id"], 1], "none": None}

    fields = [edit_field("half", np.float32, ()), edit_field("pair", np.int16, (2,)), UnischemaField("none", np.int8)]
    row = next(make_reader(things, ["id"], transform_spec=TransformSpec(add, fields), shuffle_row_groups=False))
    assert (row.half.dtype, row.pair.dtype, row.pair.tolist(), row.none) == (np.float32, np.int16, [0, 1], None)
    loader = DataLoader(make_reader(things, ["id"], transform_spec=TransformSpec(add, fields, ["none"])), batch_size=4)
    batch = next(iter(loader))
    assert (batch["half"].dtype, batch["pair"].dtype, batch["pair"].shape) == (torch.float32, torch.int16, (4, 2))

    wrong_shape = TransformSpec(add, [edit_field("pair", np.int16, (3,))])
    with pytest.raises(DataError, match=r"'pair'.*int16 \(2,\).*int16 \(3,\)"):
        list(make_reader(things, ["id"], transform_spec=wrong_shape))
    wrong_type = TransformSpec(lambda row: {"id": "many"}, [edit_field("id", np.int16, ())])
    with pytest.raises(DataError, match="'id': a value can't be read"):
        list(make_reader(things, ["id"], transform_spec=wrong_type))


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_column_of_edit_fields_that_the_function_does_not_make_is_an_error(make: Any, things: str) -> None:
    spec = TransformSpec(lambda rows: rows, [edit_field("half", np.float32, ())])
    with pytest.raises(DataError, match="returned no column 'half', only id"):
        next(make(things, ["id"], transform_spec=spec))


def test_a_loader_makes_tensors_of_decoded_rows(things: str) -> None:
    fields = [UnischemaField("image", np.uint8), UnischemaField("id", np.int64), UnischemaField("price", Decimal)]
    with DataLoader(make_reader(things, fields, shuffle_row_groups=False), batch_size=8) as loader:
        batches = list(loader)
    assert [len(batch["id"]) for batch in batches] == [8, 8, 4]
    assert (batches[0]["image"].dtype, batches[0]["image"].shape) == (torch.uint8, (8, 4, 3, 3))
    assert batches[1]["price"][0] == Decimal(2)
    with pytest.raises(DataError, match="'small' has a None"):
        list(DataLoader(make_reader(things, ["small"]), batch_size=8))
    with pytest.raises(DataError, match="'matrix' has values of several shapes"):
        list(DataLoader(make_reader(things, ["matrix"], predicate=in_lambda(["id"], lambda number: number > 3)), 8))


def test_collate_fn_is_given_the_rows_of_a_batch(things: str) -> None:
    loader = DataLoader(make_reader(things, ["id", "small"], shuffle_row_groups=False), 6, collate_fn=list)
    first: Any = next(iter(loader))
    assert [row["small"] for row in first] == [0, None, 2, None, 4, None]
    with pytest.raises(ConfigError, match="collate_fn"):
        DataLoader(make_batch_reader(things, ["id"]), collate_fn=list)


def test_a_loader_of_decoded_rows_resumes_exactly(things: str) -> None:
    def numbers(batches: Iterable[Any]) -> list[int]:
        return [row["id"] for batch in batches for row in batch]

    loader = DataLoader(make_reader(things, ["id", "matrix"], seed=3), 3, collate_fn=list)
    batches = iter(loader)
    taken = numbers([next(batches), next(batches)])
    state = loader.state_dict()
    rest = numbers(batches)
    again = DataLoader(make_reader(things, ["id", "matrix"], seed=3), 3, collate_fn=list)
    again.load_state_dict(state)
    assert numbers(again) == rest
    assert sorted(taken + rest) == list(range(20))


def test_a_batch_reader_gives_the_stored_values(things: str) -> None:
    batch = next(make_batch_reader(things, ["image"], shuffle_row_groups=False))
    assert batch.image[0].startswith(b"\x89PNG")


def test_filters_and_shards_are_those_of_the_stored_table(things: str) -> None:
    rows = list(make_reader(things, ["id", "price"], filters=[("small", ">=", 10)], shuffle_row_groups=False))
    assert [row.id for row in rows] == [10, 12, 14, 16, 18]
    shards = [[row.id for row in make_reader(things, ["id"], cur_shard=n, shard_count=2)] for n in range(2)]
    assert sorted(shards[0] + shards[1]) == list(range(20))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('the pickle ran')",))


@pytest.mark.parametrize("content", [pickle.dumps(Bomb()), pickle.dumps(Path()), b"nothing", pickle.dumps([1])])
def test_what_a_pickle_names_is_not_run(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"_common_metadata: .*(names|can't be read|expected a Unischema)"):
        make_reader(write_things(tmp_path, content))


def test_a_codec_of_ones_own_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"petastorm\.codecs\.NdarrayCodex.*make_batch_reader"):
        parse_unischema(SCHEMA.replace(b"NdarrayCodec", b"NdarrayCodex"))


def test_records_of_one_pickle_do_not_reach_another() -> None:
    """A pickle may set attributes of the classes that it names. Each reading makes these classes again."""
    # A pickle that names UnischemaField, sets its attribute `decode`, and has no schema.
    content = b"\x80\x02cpetastorm.unischema\nUnischemaField\n(N}X\x06\x00\x00\x00decodeI1\nstb."
    with pytest.raises(DataError, match="expected a Unischema"):
        parse_unischema(content)
    assert callable(parse_unischema(SCHEMA).id.decode)


def test_a_value_that_is_not_what_its_field_says_is_refused_by_name() -> None:
    field = UnischemaField("image", np.uint8, (4, 3, 3), CompressedImageCodec("png"))
    with pytest.raises(DataError, match=r"'image'.*uint8 \(4, 3\).*uint8 \(4, 3, 3\)"):
        field.decode(png(PIXELS[:, :, 0]))
    with pytest.raises(DataError, match="'image': a value can't be read as CompressedImageCodec"):
        field.decode(b"no image")
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb()], object), allow_pickle=True)
    matrix = parse_unischema(SCHEMA).matrix
    with pytest.raises(DataError, match="'matrix': a value can't be read as NdarrayCodec"):
        matrix.decode(stream.getvalue())


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (in_lambda(["id", "small"], lambda number, small: number > 15 and small is None), [17, 19]),
        (in_lambda(["id"], lambda number, known: number in known, {3, 4}), [3, 4]),
        (in_set({"n5", "n6"}, "name"), [5, 6]),
        (in_negate(in_lambda(["id"], lambda number: number > 1)), [0, 1]),
        (in_reduce([in_set({1, 2, 3}, "id"), in_set({2, 3, 4}, "id")], all), [2, 3]),
        (in_reduce([in_set({1}, "id"), in_set({4}, "id")], any), [1, 4]),
        (in_intersection({18}, "list"), [19]),
    ],
)
def test_predicates_choose_rows_before_batches_are_planned(predicate: Any, expected: list[int], things: str) -> None:
    with make_reader(things, ["id"], predicate=predicate, shuffle_row_groups=False) as reader:
        assert [row.id for row in reader] == expected
        assert len(DataLoader(reader, batch_size=2)) == (len(expected) + 1) // 2


def test_a_predicate_of_a_plain_table_joins_the_filter(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10), "y": [number % 2 for number in range(10)]}), tmp_path / "p.parquet")
    even = in_lambda(["y"], lambda y: y == 0)
    batches = list(
        make_batch_reader(str(tmp_path), ["x"], predicate=even, filters=[("x", ">", 3)], shuffle_row_groups=False)
    )
    assert [number for batch in batches for number in batch.x.tolist()] == [4, 6, 8]
    with pytest.raises(DataError, match="no column 'z'"):
        make_batch_reader(str(tmp_path), predicate=in_set({1}, "z"))


def test_a_pseudorandom_split_has_petastorms_parts() -> None:
    """The split of 0 to 11 by Petastorm 0.13.1."""
    parts = [
        [n for n in range(12) if in_pseudorandom_split([0.3, 0.5, 0.2], part, "x").do_include({"x": n})]
        for part in range(3)
    ]
    assert parts == [[0, 1, 3, 5, 6, 10], [4], [2, 7, 8, 9, 11]]
    with pytest.raises(ConfigError, match="subset_index=3"):
        in_pseudorandom_split([0.3, 0.5, 0.2], 3, "x")


def test_decimal_friendly_collate_leaves_decimals_as_they_are() -> None:
    batch = decimal_friendly_collate([{"d": Decimal("1.0"), "n": 1}, {"d": Decimal("1.1"), "n": 2}])
    assert batch["d"] == [Decimal("1.0"), Decimal("1.1")]
    assert batch["n"].tolist() == [1, 2]
