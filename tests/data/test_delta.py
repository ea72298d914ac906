"""Delta features that make a plain read of the files wrong: supported, or refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from footplate.core.errors import DataError
from footplate.data import Loader, Table

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85(data: bytes) -> str:
    text = ""
    for (word,) in struct.iter_unpack(">I", data):
        text += "".join(_Z85[word // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text


def deletion_vector(rows: list[int]) -> dict[str, object]:
    """Make an inline deletion vector: a RoaringBitmapArray of one array container, as in the protocol."""
    container = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16) + struct.pack(f"<{len(rows)}H", *rows)
    data = struct.pack("<IQI", 1681511377, 1, 0) + container
    padded = data + b"\0" * (-len(data) % 4)
    return {"storageType": "i", "pathOrInlineDv": z85(padded), "sizeInBytes": len(data), "cardinality": len(rows)}


def write_log(
    table: Path, features: list[str], configuration: dict[str, str], fields: list[dict], adds: list[dict]
) -> None:
    actions: list[dict] = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {
            "metaData": {
                "id": "0b0c1f3e-6f0f-4a9c-9f0e-2f3a4b5c6d7e",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": [],
                "configuration": configuration,
                "createdTime": 1700000000000,
            }
        },
    ]
    for add in adds:
        size = (table / add["path"]).stat().st_size
        actions.append(
            {"add": {"partitionValues": {}, "size": size, "modificationTime": 1700000000000, "dataChange": True, **add}}
        )
    log = table / "_delta_log"
    log.mkdir()
    (log / f"{0:020}.json").write_text("\n".join(json.dumps(action) for action in actions))


def field(name: str, kind: str = "long", **metadata: object) -> dict:
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


def test_rows_hidden_by_a_deletion_vector_are_not_handed_out(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "a.parquet", row_group_size=30)
    pq.write_table(pa.table({"id": range(100, 120)}), tmp_path / "b.parquet")
    stats = json.dumps({"numRecords": 100, "tightBounds": False})
    adds = [
        {"path": "a.parquet", "deletionVector": deletion_vector([0, 31, 32, 99]), "stats": stats},
        {"path": "b.parquet", "stats": json.dumps({"numRecords": 20})},
    ]
    write_log(tmp_path, ["deletionVectors"], {"delta.enableDeletionVectors": "true"}, [field("id")], adds)
    table = Table(tmp_path)
    live = sorted(set(range(120)) - {0, 31, 32, 99})
    assert table.num_rows == 116
    assert [group.num_rows for group in table.row_groups] == [29, 28, 30, 9, 20]
    for shuffle in (False, True):
        assert sorted(row for batch in Loader(table, 16, shuffle=shuffle) for row in batch["id"].tolist()) == live
    assert Table(tmp_path, filter=[("id", "<", 33)]).num_rows == 30


def test_nulls_of_deleted_rows_are_no_nulls(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0, None, 2, None]}), tmp_path / "a.parquet")
    vector = {"deletionVector": deletion_vector([1, 3]), "stats": json.dumps({"numRecords": 4})}
    adds = [{"path": "a.parquet", **vector}]
    write_log(tmp_path, ["deletionVectors"], {"delta.enableDeletionVectors": "true"}, [field("label")], adds)
    assert [batch["label"].tolist() for batch in Loader(Table(tmp_path), 4)] == [[0, 2]]


def test_columns_that_were_renamed_are_found_under_their_physical_names(tmp_path: Path) -> None:
    pq.write_table(pa.table({"col-1": [1, 2], "col-2": ["x", "y"]}), tmp_path / "a.parquet")
    fields = [
        field("id", **{"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}),
        field("name", "string", **{"delta.columnMapping.id": 2, "delta.columnMapping.physicalName": "col-2"}),
    ]
    write_log(tmp_path, ["columnMapping"], {"delta.columnMapping.mode": "name"}, fields, [{"path": "a.parquet"}])
    table = Table(tmp_path, filter=[("id", ">", 1)])
    assert table.head(5).to_pylist() == [{"id": 2, "name": "y"}]
    assert table.nulls("name") == 0


def test_column_mapping_by_id_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    fields = [field("id", **{"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "id"})]
    write_log(tmp_path, ["columnMapping"], {"delta.columnMapping.mode": "id"}, fields, [{"path": "a.parquet"}])
    with pytest.raises(DataError, match="maps its columns by id"):
        Table(tmp_path)


def test_a_binary_partition_column_is_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"key": [b"a\xff"], "id": [1]}), partition_by=["key"])
    with pytest.raises(DataError, match="partitioned by the binary column 'key'"):
        Table(tmp_path)


def test_a_reader_feature_that_is_not_known_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    write_log(tmp_path, ["variantType"], {}, [field("id")], [{"path": "a.parquet"}])
    with pytest.raises(DataError, match="variantType"):
        Table(tmp_path)


def test_a_file_outside_of_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    write_log(tmp_path / "t", ["vacuumProtocolCheck"], {}, [field("id")], [{"path": str(tmp_path / "a.parquet")}])
    with pytest.raises(DataError, match="outside of it"):
        Table(tmp_path / "t")


def test_a_log_that_is_no_log_is_an_error_not_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    with pytest.raises(DataError, match="Delta log can't be read"):
        Table(tmp_path)
