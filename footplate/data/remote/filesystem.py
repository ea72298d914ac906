"""Remote file systems with retries and an optional disk cache.

A request that fails for a temporary reason (a broken connection, a busy server) is retried, up to `ATTEMPTS` times in
all, after 0.1, 0.2, 0.4 … seconds plus a random part. An error that can't pass by waiting (a missing file, missing
permissions) is raised at once. A large read is split into requests of 8 MiB, four at a time.

Each time a file is opened to be read, the server is asked for its tag, to see whether another file has replaced it. The
first bytes are asked for at the same time, so reading a row group takes the time of one answer of the server.

A forked process opens connections of its own. If two processes used one connection, each would get answers to the other's
requests.

Everything else is as in the pyarrow file system that is wrapped. So every kind of table has retries and cache.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from footplate.data.remote.file_cache import BlockStore, Fetch, FileCache

T = TypeVar("T")

ATTEMPTS = 6
_FIRST_WAIT_S = 0.1
_REQUEST_BYTES = 8 * 1024 * 1024
_REQUESTS = 4
_PERMANENT = re.compile(
    r"ACCESS_DENIED|NO_SUCH|NOT_FOUND|INVALID|SIGNATURE|UNRECOGNIZED|MISSING_AUTH|TOKEN|CREDENTIAL|PERMISSION"
    r"|UNAUTHENTICATED|HTTP status 40[0134]",
    re.IGNORECASE,
)


def wrap(filesystem: pafs.FileSystem, cache: FileCache | None, service: str = "") -> pafs.FileSystem:
    """Wrap a remote file system with retries, and with a disk cache if there is one.

    Args:
        filesystem: the file system to wrap.
        cache: keeps what is read; or None.
        service: the address of the service, if it isn't the default. Two services may have buckets of the same name.
    """
    return pafs.PyFileSystem(RemoteFiles(filesystem, cache.open() if cache else None, service))


def identify(filesystem: pafs.FileSystem, path: str) -> Identity | None:
    """Return the identity of a remote file when it was first opened; None for a local file.

    Raises:
        OSError: the file doesn't exist, or the service can't be reached.
    """
    handler = filesystem.handler if isinstance(filesystem, pafs.PyFileSystem) else None
    return handler.identify(path) if isinstance(handler, RemoteFiles) else None


def retrying(work: Callable[[], T]) -> T:
    """Call `work`, and call it again if it fails for a temporary reason."""
    for attempt in range(1, ATTEMPTS):
        try:
            return work()
        except OSError as error:
            if isinstance(error, (FileNotFoundError, PermissionError)) or _PERMANENT.search(str(error)):
                raise
            time.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1) * (1 + random.random()))
    return work()


@dataclass(frozen=True)
class Identity:
    """Size and tag of a file. Both or one of them change if the file changes."""

    size: int
    tag: str


class RemoteFile(io.RawIOBase):
    """A file that is read by ranges.

    Args:
        fetch: reads from the network.
        check: raises if another file has replaced it. It is called beside each request, until it has succeeded once.
        name: the cache's name for the file and its content.
        size: the size in bytes.
        blocks: the cache, or None.
    """

    def __init__(
        self,
        fetch: Fetch,
        check: Callable[[], None],
        name: str,
        size: int,
        blocks: BlockStore | None,
    ) -> None:
        super().__init__()
        self._fetch_native, self._check, self._name, self._size = fetch, check, name, size
        self._blocks = blocks
        self._is_checked = False
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        """Read from the current offset on. Only at the end, there are fewer bytes than `size`."""
        length = self._size - self._at if size < 0 else min(size, self._size - self._at)
        if length <= 0:
            return b""
        if self._blocks is None:
            data = self._fetch_all(self._at, length)
        else:
            data = self._blocks.read(self._name, self._size, self._at, length, self._fetch)
        self._at += length
        return data

    def _fetch_all(self, offset: int, length: int) -> bytes:
        starts = range(offset, offset + length, _REQUEST_BYTES)
        if len(starts) == 1:
            return self._fetch(offset, length)
        with ThreadPoolExecutor(min(_REQUESTS, len(starts)), "footplate-fetch") as pool:
            parts = pool.map(lambda at: self._fetch(at, min(_REQUEST_BYTES, offset + length - at)), starts)
            return b"".join(parts)

    def _fetch(self, offset: int, length: int) -> bytes:
        return retrying(lambda: self._fetch_once(offset, length))

    def _fetch_once(self, offset: int, length: int) -> bytes:
        if self._is_checked:
            return self._fetch_native(offset, length)
        with ThreadPoolExecutor(1, "footplate-check") as pool:
            checking = pool.submit(self._check)
            try:
                data = self._fetch_native(offset, length)
            finally:
                # A range may be missing because the file was replaced. Then that is the error.
                checking.result()
        self._is_checked = True
        return data


@dataclass(frozen=True)
class _Connection:
    """A file system, and the process that may use it.

    Attributes:
        process: the process's id.
        filesystem: pyarrow's file system, with its sockets.
        natives: the open files. An open file asks the server for nothing but the bytes that are read. It takes 1.3 KB.
    """

    process: int
    filesystem: pafs.FileSystem
    natives: dict[str, pa.NativeFile] = field(default_factory=dict)


# Connections of parent processes. They stay open here, since closing one would tell the server that the parent has gone.
_inherited: list[_Connection] = []


class RemoteFiles(pafs.FileSystemHandler):
    """A file system for pyarrow, written in Python. Reads and listings are retried. Everything else is passed on."""

    def __init__(self, inner: pafs.FileSystem, blocks: BlockStore | None, service: str) -> None:
        self._own = _Connection(os.getpid(), inner)
        self._blocks, self._service = blocks, service
        # The identities of files that were opened. With a complete cache, such a file is opened again without a request.
        self._known: dict[str, Identity] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self._inner, self._blocks, self._service), {"_known": self._known}

    @property
    def _connection(self) -> _Connection:
        """The connection of this process."""
        if self._own.process != os.getpid():
            _inherited.append(self._own)
            self._own = _Connection(os.getpid(), pickle.loads(pickle.dumps(self._own.filesystem)))
        return self._own

    @property
    def _inner(self) -> pafs.FileSystem:
        """The file system that is wrapped."""
        return self._connection.filesystem

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFiles) and self._inner == other._inner

    def __ne__(self, other: object) -> bool:
        return not self == other

    def get_type_name(self) -> str:
        return self._inner.type_name

    def normalize_path(self, path: str) -> str:
        return self._inner.normalize_path(path)

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        return retrying(lambda: self._inner.get_file_info(list(paths)))

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return retrying(lambda: self._inner.get_file_info(selector))

    def identify(self, path: str) -> Identity:
        """Return the identity of a file when it was first opened."""
        known = self._known.get(path)
        if known is None:
            native = retrying(lambda: self._inner.open_input_file(path))
            known = self._known[path] = self._identify(path, native)
            self._connection.natives[path] = native
        return known

    def open_input_file(self, path: str) -> pa.NativeFile:
        known = self.identify(path)
        name = f"{self._inner.type_name} {self._service} {path} {known.size} {known.tag}"
        fetch, check = partial(self._fetch, path, known), partial(self._check, path, known)
        return pa.PythonFile(RemoteFile(fetch, check, name, known.size, self._blocks), mode="r")

    def _fetch(self, path: str, known: Identity, offset: int, length: int) -> bytes:
        natives = self._connection.natives
        native = natives.get(path) or self._open(path, known)
        try:
            data = native.read_at(length, offset)
            if len(data) != length:
                raise OSError(f"read {len(data)} bytes at {offset} instead of {length}")
        except OSError:
            natives.pop(path, None)
            raise
        natives[path] = native
        return data

    def _check(self, path: str, known: Identity) -> None:
        self._open(path, known).close()

    def _open(self, path: str, known: Identity) -> pa.NativeFile:
        native = self._inner.open_input_file(path)
        if self._identify(path, native) != known:
            raise FileNotFoundError(f"{path} was replaced by another file")
        return native

    def _identify(self, path: str, native: pa.NativeFile) -> Identity:
        tags = {str(name).lower(): value for name, value in (native.metadata() or {}).items()}
        tag = tags.get("etag") or tags.get("generation") or self._inner.get_file_info(path).mtime_ns
        return Identity(native.size(), tag.decode() if isinstance(tag, bytes) else str(tag))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._inner.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._inner.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        self._inner.delete_dir_contents("/", accept_root_dir=True)

    def delete_file(self, path: str) -> None:
        self._inner.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._inner.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._inner.copy_file(src, dest)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        stream = self._inner.open_output_stream(path, compression=None, metadata=metadata)
        return stream if isinstance(stream, pa.NativeFile) else pa.PythonFile(stream, mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return self._inner.open_append_stream(path, compression=None, metadata=metadata)
