"""Where Trackio keeps its rows: its directory on this machine, or a server. Only the uploader process imports this module.

Trackio's own `log` hands rows to a thread, which warns and loses them if they can't be written. So both stores use what is
below it: they write at once, and raise. A row has an id, and a row with a known id is ignored. So a row may be sent again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from footplate.core.optional import require
from footplate.tracking.parameters import without_credentials
from footplate.tracking.trackers import REQUEST_TIMEOUT_S

# Trackio's own fields: project, run, run_id, step, metrics, config, timestamp, log_id.
Row = dict[str, Any]


class Store(Protocol):
    """What both stores can do."""

    def add(self, rows: list[Row]) -> None:
        """Store rows of one run, or none of them. Rows with known ids are ignored."""
        ...

    def add_file(self, file: Path, name: str, row: Row) -> None:
        """Store the file of a row's picture under a name that no other picture of the project has."""
        ...


class Directory:
    """Trackio's directory on this machine: a database for each project, and a folder of pictures.

    On a network file system, two machines would damage a database. There Trackio reads files of rows from an inbox, and
    adds them to the database when somebody looks at the project.
    """

    def __init__(self) -> None:
        fragments = trackio("fragments")
        self._as_record = fragments.metric_record
        self._inbox = fragments.FragmentWriter()

    def add(self, rows: list[Row]) -> None:
        """Write rows in one transaction."""
        if trackio("utils").get_storage_mode() == "jsonl":
            self._inbox.write_local([self._as_record(row) for row in rows])
            return
        trackio("sqlite_storage").SQLiteStorage.bulk_log(
            project=rows[0]["project"],
            run=rows[0]["run"],
            run_id=rows[0]["run_id"],
            metrics_list=[row["metrics"] for row in rows],
            steps=[row["step"] for row in rows],
            timestamps=[row["timestamp"] for row in rows],
            config=next((row["config"] for row in rows if row["config"]), None),
            log_ids=[row["log_id"] for row in rows],
        )

    def add_file(self, file: Path, name: str, row: Row) -> None:
        """Copy the file into Trackio's folder of pictures."""
        folder = trackio().get_project_media_path(row["project"], row["run"], row["step"])
        draft = folder / f".{name}"
        shutil.copyfile(file, draft)
        draft.replace(folder / name)


class Server:
    """A server that somebody hosts with `trackio show`. It sets the times of rows itself: to those of their arrival.

    Args:
        uri: its address, with the write token in place of a user.
    """

    def __init__(self, uri: str) -> None:
        self._client = trackio("remote_client").RemoteClient(
            without_credentials(uri),
            write_token=unquote(urlsplit(uri).username or ""),
            httpx_kwargs={"timeout": REQUEST_TIMEOUT_S},
        )

    def add(self, rows: list[Row]) -> None:
        """Send rows, and wait until the server has stored them."""
        # JSON has no form for NaN.
        logs = trackio("utils").serialize_values(rows)
        self._ask("/bulk_log", logs=logs)

    def add_file(self, file: Path, name: str, row: Row) -> None:
        """Send the file."""
        from gradio_client import handle_file

        upload = {
            **{field: row[field] for field in ("project", "run", "run_id", "step")},
            "relative_path": None,
            "uploaded_file": {**handle_file(file), "orig_name": name},
        }
        self._ask("/bulk_upload_media", uploads=[upload])

    def _ask(self, name: str, **arguments: Any) -> None:
        """Call a function of the server. Of a refusal, Trackio's client tells only the status."""
        try:
            self._client.predict(api_name=name, hf_token=None, **arguments)
        except Exception as error:
            response = getattr(error, "response", None)
            if response is None:
                raise
            raise RuntimeError(
                f"the server refused the request with status {response.status_code}: {response.text[:300]}"
            ) from error


def trackio(module: str = "") -> Any:
    """Import Trackio, or one of its modules. Trackio reads its directory from the environment when it is imported."""
    return require(f"trackio.{module}" if module else "trackio", "trackio", "Logging to Trackio")


def open_store(uri: str) -> Store:
    """Open a store by its address: that of a server, or a directory."""
    if uri.startswith(("http://", "https://")):
        return Server(uri)
    os.environ["TRACKIO_DIR"] = uri
    return Directory()
