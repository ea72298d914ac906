"""Containers of Azure Blob Storage and of Data Lake Storage as file systems, by Azure's library for Python.

pyarrow has a file system for Azure, too. It isn't used: with the emulator Azurite, its C++ library waited for seconds after
answers that were complete, and an answer that it couldn't parse ended the process.

Credentials, in this order: AZURE_STORAGE_ACCOUNT_KEY; AZURE_STORAGE_SAS_TOKEN; none with AZURE_SKIP_SIGNATURE=true, for
public data; else an identity (DefaultAzureCredential): of AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET, of the
machine or the cluster, or of `az login`.

In an account with directories ("hierarchical namespace"), a directory is an empty blob with a mark, and is left out of
listings like in one without.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import pyarrow.fs as pafs

from footplate.core.optional import require

# Part of an upload. A blob has 50,000 parts at most, so it may have 800 GB.
_BLOCK_NBYTES = 16 << 20
_UPLOADS = 4
# Seconds until a server must have accepted a connection, and may be silent.
_TIMEOUTS_S: dict[str, Any] = {"connection_timeout": 10, "read_timeout": 60}


class AzureFiles:
    """A container, with the methods of pyarrow's file systems that tables and checkpoints need. Paths begin with its name.

    Args:
        server: the address of the account, such as `https://account.blob.core.windows.net`.
        container: the name.
        environ: environment variables with credentials.
        attempts: how often a request is made before it fails.
    """

    type_name = "azure"

    def __init__(self, server: str, container: str, environ: Mapping[str, str], attempts: int) -> None:
        require("azure.storage.blob", "azure", "Reading and writing abfss://")
        self._server, self._name, self._environ, self._attempts = server, container, environ, attempts
        # The process that may use the client, and its client.
        self._client: tuple[int, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Credentials stay here. The other process has its own.
        return _reopen, (self._server, self._name, self._attempts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AzureFiles) and (self._server, self._name) == (other._server, other._name)

    def __hash__(self) -> int:
        return hash((self._server, self._name))

    def normalize_path(self, path: str) -> str:
        """Return a path as it is."""
        return path

    def get_file_info(self, paths: str | Sequence[str] | pafs.FileSelector) -> Any:
        """Look up a path or several, or list a directory.

        Raises:
            FileNotFoundError: there is no such directory.
            PermissionError: the service doesn't accept the credentials.
            OSError: the service can't be reached.
        """
        if isinstance(paths, pafs.FileSelector):
            return self._list(paths)
        return self._info(paths) if isinstance(paths, str) else [self._info(path) for path in paths]

    def open_input_file(self, path: str) -> AzureFile:
        """Open a file.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: the service doesn't accept the credentials.
            OSError: the service can't be reached.
        """
        with _errors(path):
            blob = self._container.get_blob_client(self._key(path))
            about = blob.get_blob_properties()
        return AzureFile(path, blob, about.size, about.etag)

    def open_output_stream(self, path: str, **_: Any) -> AzureUpload:
        """Begin a file, which replaces another when it is closed."""
        return AzureUpload(path, self._container.get_blob_client(self._key(path)))

    def delete_file(self, path: str) -> None:
        """Delete a file.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the service can't be reached, or refuses it.
        """
        with _errors(path):
            self._container.delete_blob(self._key(path))

    def delete_dir(self, path: str) -> None:
        """Delete all files of a directory.

        Raises:
            FileNotFoundError: there is no such directory.
            OSError: the service can't be reached, or refuses it.
        """
        with _errors(path):
            names = list(self._container.list_blob_names(name_starts_with=f"{self._key(path)}/"))
            if not names:
                raise FileNotFoundError(f"{path}: there is no such directory")
            for name in reversed(names):
                self._container.delete_blob(name)

    @property
    def _container(self) -> Any:
        """The client of this process. A forked process opens connections of its own."""
        if self._client is None or self._client[0] != os.getpid():
            from azure.storage.blob import ContainerClient

            client = ContainerClient(
                self._server, self._name, credential=_credential(self._environ), retry_total=self._attempts - 1,
                initial_backoff=1, increment_base=2, **_TIMEOUTS_S,
            )  # fmt: skip
            self._client = (os.getpid(), client)
        return self._client[1]

    def _info(self, path: str) -> pafs.FileInfo:
        key = self._key(path)
        with _errors(path):
            if not key:
                kind = pafs.FileType.Directory if self._container.exists() else pafs.FileType.NotFound
                return pafs.FileInfo(path, kind)
            blob = self._container.get_blob_client(key)
            with contextlib.suppress(FileNotFoundError), _errors(path):
                return _file_info(path, blob.get_blob_properties())
            below = self._container.list_blob_names(name_starts_with=f"{key}/", results_per_page=1)
            return pafs.FileInfo(path, pafs.FileType.Directory if any(below) else pafs.FileType.NotFound)

    def _list(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        key = self._key(selector.base_dir)
        prefix = f"{key}/" if key else ""
        with _errors(selector.base_dir):
            listing = self._container.list_blobs if selector.recursive else self._container.walk_blobs
            infos = [
                _file_info(f"{self._name}/{blob.name}".rstrip("/"), blob)
                for blob in listing(name_starts_with=prefix, include=["metadata"])
                if blob.name != prefix
            ]
        if not infos and not selector.allow_not_found:
            raise FileNotFoundError(f"{selector.base_dir}: there is no such directory")
        return infos

    def _key(self, path: str) -> str:
        name, _, key = path.partition("/")
        assert name == self._name, path
        return key.rstrip("/")


class AzureFile:
    """A file that is read by ranges.

    Args:
        path: its path, for messages.
        blob: the client of the blob.
        size: the size in bytes.
        tag: the tag of its content.
    """

    def __init__(self, path: str, blob: Any, size: int, tag: str) -> None:
        self._path, self._blob, self._size, self._tag = path, blob, size, tag

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def size(self) -> int:
        """The size in bytes."""
        return self._size

    def metadata(self) -> dict[str, str]:
        """The tag of the content."""
        return {"etag": self._tag}

    def read(self) -> bytes:
        """Read all.

        Raises:
            OSError: the service can't be reached, or refuses access.
        """
        return self.read_at(self._size, 0)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Read some bytes.

        Raises:
            OSError: the service can't be reached, or refuses access.
        """
        if nbytes == 0:
            return b""
        with _errors(self._path):
            return self._blob.download_blob(offset=offset, length=nbytes).readall()

    def close(self) -> None:
        """Do nothing: the connections are the container's."""


class AzureUpload:
    """A file that is written in parts, some at a time. Nobody sees it before `close`.

    Args:
        path: its path, for messages.
        blob: the client of the blob.
    """

    def __init__(self, path: str, blob: Any) -> None:
        self._path, self._blob = path, blob
        self._pool = ThreadPoolExecutor(_UPLOADS, "footplate-upload")
        self._pending = bytearray()
        self._blocks: list[tuple[str, Future[None]]] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # Azure removes parts that belong to no blob after a week.
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def closed(self) -> bool:
        """True once it is the file."""
        return self._closed

    def write(self, piece: Any) -> int:
        """Write some bytes."""
        view = memoryview(piece).cast("B")
        self._pending += view
        if len(self._pending) >= _BLOCK_NBYTES:
            self._send()
        return len(view)

    def flush(self) -> None:
        """Wait until all that was sent has arrived.

        Raises:
            OSError: the service can't be reached, or refuses access.
        """
        for _, sent in self._blocks:
            sent.result()

    def close(self) -> None:
        """Send the rest, and let the parts become the file.

        Raises:
            OSError: the service can't be reached, or refuses access.
        """
        if self._closed:
            return
        self._closed = True
        from azure.storage.blob import BlobBlock

        with self._pool:
            if self._pending:
                self._send()
            self.flush()
            with _errors(self._path):
                self._blob.commit_block_list([BlobBlock(name) for name, _ in self._blocks])

    def _send(self) -> None:
        name = base64.b64encode(f"{len(self._blocks):06}".encode()).decode()
        self._blocks.append((name, self._pool.submit(self._stage, name, bytes(self._pending))))
        self._pending.clear()

    def _stage(self, name: str, content: bytes) -> None:
        with _errors(self._path):
            self._blob.stage_block(name, content)


def _reopen(server: str, container: str, attempts: int) -> AzureFiles:
    return AzureFiles(server, container, os.environ, attempts)


def _credential(environ: Mapping[str, str]) -> Any:
    if key := environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
        return key
    if token := environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return token
    if environ.get("AZURE_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return None
    return require("azure.identity", "azure", "Logging in to Azure").DefaultAzureCredential()


def _file_info(path: str, blob: Any) -> pafs.FileInfo:
    """The information on a blob, or on the beginning of names that a listing found."""
    is_directory = not hasattr(blob, "size") or (blob.metadata or {}).get("hdi_isfolder") == "true"
    if is_directory:
        return pafs.FileInfo(path, pafs.FileType.Directory)
    return pafs.FileInfo(path, pafs.FileType.File, size=blob.size, mtime=blob.last_modified)


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    """Turn the errors of Azure's library into those of a file system.

    Raises:
        FileNotFoundError: there is no such file, or no such container.
        PermissionError: the service doesn't accept the credentials, or there are none.
        OSError: any other failure.
    """
    from azure.core.exceptions import AzureError, ClientAuthenticationError

    try:
        yield
    except AzureError as error:
        status = getattr(error, "status_code", None)
        code = getattr(error, "error_code", None)
        first_line = str(error).strip().partition("\n")[0]
        why = f"{path}: {first_line}" + (f" (HTTP status {status}, {code})" if status else "")
        if status == 404:
            raise FileNotFoundError(why) from error
        if status in (401, 403) or isinstance(error, ClientAuthenticationError):
            raise PermissionError(why) from error
        raise OSError(why) from error
