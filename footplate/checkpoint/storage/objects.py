"""Checkpoints in S3, Google Cloud Storage and Azure Blob Storage, which can't rename objects.

    checkpoints/epoch=3.ckpt/state-5f1c….safetensors    uploaded first, in parts, under a new name
    checkpoints/epoch=3.ckpt/meta.json                  the marker, written last; it names that object
    checkpoints/last.ckpt                               a pointer: {"points_to": "epoch=3.ckpt"}

A write uploads the state, then the marker, and then removes the state that the older marker named. At every moment the
marker names a complete state, the old one or the new one. A deletion removes the marker first. A process that is killed in
between leaves a state that no marker names; `clean_up` removes it. The parts of an unfinished upload are invisible, and
Footplate can't delete them. Set a rule on the bucket that aborts unfinished multi-part uploads after a day.

The state is uploaded straight from the memory that it was copied into, some parts at a time (`_IN_FLIGHT_NBYTES`), so an
upload needs little memory of its own. Every request is retried with increasing delays while the service fails or can't be
reached. After some minutes (`DELAYS_S`, and as long again in the library's own attempts) it is an error. Credentials and
endpoints are the same as for tables: see `footplate.data.remote.services`.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, BinaryIO, Literal, TypeVar, cast

import pyarrow as pa
import pyarrow.fs as pafs

from footplate.checkpoint.format.statefile import Frozen, Written
from footplate.checkpoint.storage.base import META, STATE, SUFFIX, RemotePath, Store, marker
from footplate.core.errors import CheckpointError, ConfigError
from footplate.data.remote.services import SETTINGS, Address, connect, credentials_of, parse

log = logging.getLogger(__name__)

T = TypeVar("T")

# The delay before each retry.
DELAYS_S = (0.5, 1, 2, 4, 8, 16, 30)
# pyarrow's own attempts for each part of an upload.
_ATTEMPTS = 5
# The most that an upload sends before it waits for the service.
_IN_FLIGHT_NBYTES = 64 << 20
# The most that one request reads.
_REQUEST_NBYTES = 16 << 20
# The least that one request reads, to prefetch for small reads.
_READ_AHEAD_NBYTES = 8 << 20
_OURS = re.compile(r"(?P<checkpoint>.*\.ckpt)/(state[^/]*\.safetensors|meta\.json)")
# Errors that a retry can't fix.
_FINAL = re.compile(
    r"ACCESS_DENIED|NO_SUCH_|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_(CLIENT_)?TOKEN|EXPIRED_TOKEN|"
    r"No such directory|PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND|INVALID_ARGUMENT|HTTP status 40[0134]|Permission denied"
)


class ObjectStore(Store):
    """A store in a bucket. Paths are `RemotePath`s. The module's docstring describes it."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._files = filesystem

    @classmethod
    def of(cls, place: RemotePath) -> ObjectStore:
        """The store of a place, with the current credentials and endpoints of the environment."""
        settings = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
        address = _address(place)
        bucket = replace(address, path=address.path.partition("/")[0])
        return cls(_filesystem(bucket, tuple(sorted(settings.items()))))

    def prepare(self, directory: RemotePath) -> None:
        probe = directory / f".tmp-probe-{uuid.uuid4().hex}"
        try:
            self._put(probe, b"")
            self._ask(f"{directory} can't be written to", lambda: self._files.delete_file(_key(probe)))
        except CheckpointError as error:
            raise ConfigError(
                f"ModelCheckpoint: {directory} can't be written to ({error}). Check the bucket's name and the credentials: "
                f"{credentials_of(_address(directory))}."
            ) from error

    def clean_up(self, directory: RemotePath) -> None:
        objects: dict[str, set[str]] = {}
        for name in self._list(directory):
            match = _OURS.fullmatch(name)
            if match is not None:
                objects.setdefault(match.group("checkpoint"), set()).add(name)

        for checkpoint, names in objects.items():
            content = self.read_marker(directory / checkpoint)
            if content is None:
                self.delete(directory / checkpoint)
            elif named := _state_in(content):
                for name in names - {f"{checkpoint}/{named}", f"{checkpoint}/{META}"}:
                    self._remove(directory / name)

    def kind(self, path: RemotePath) -> Literal["directory", "file"] | None:
        kind = self._info(self.resolve(path)).type
        return "directory" if kind == pafs.FileType.Directory else "file" if kind == pafs.FileType.File else None

    def find(self, directory: RemotePath, deep: bool = True) -> list[RemotePath]:
        marked = {name.removesuffix(f"/{META}") for name in self._list(directory) if name.endswith(f"{SUFFIX}/{META}")}
        return [directory / name for name in sorted(marked) if deep or "/" not in name]

    def resolve(self, path: RemotePath) -> RemotePath:
        info = self._info(path)
        if info.type != pafs.FileType.File or info.size > 4096:
            return path
        try:
            target = json.loads(self._get(path))["points_to"]
        except (ValueError, KeyError, TypeError):
            return path
        return path.parent / str(target)

    def read_marker(self, path: RemotePath) -> bytes | None:
        file = path / META
        return self._get(file) if self._info(file).type == pafs.FileType.File else None

    def size(self, path: RemotePath, name: str) -> int | None:
        info = self._info(self._file(path, name))
        return info.size if info.type == pafs.FileType.File else None

    def open(self, path: RemotePath, name: str) -> BinaryIO:
        file = self._file(path, name)
        source = self._ask(f"{file} can't be read", lambda: self._files.open_input_file(_key(file)))
        return cast(BinaryIO, io.BufferedReader(_RangeReader(self, file, source), _READ_AHEAD_NBYTES))

    def write(self, path: RemotePath, state: Frozen, meta: dict[str, Any]) -> None:
        name = f"state-{uuid.uuid4().hex}.safetensors"
        try:
            before = _state_in(self.read_marker(path) or b"")
            written = self._ask(f"{path / name} can't be written", lambda: self._upload(path / name, state))
            self._put(path / META, marker(meta, written, object=name))
        except CheckpointError as error:
            raise CheckpointError(
                f"The checkpoint {path} could not be written. {error} Earlier checkpoints are complete."
            ) from error
        if before:
            self._remove(path / before)

    def write_file(self, path: RemotePath, write: Callable[[BinaryIO], object]) -> None:
        content = io.BytesIO()
        write(content)
        self._put(path, content.getbuffer())

    def delete(self, path: RemotePath) -> None:
        self._remove(path / META)
        self._try_delete(f"{path} can't be deleted", lambda: self._files.delete_dir(_key(path)))

    def point(self, link: RemotePath, target: RemotePath) -> None:
        name = target.uri.removeprefix(f"{link.parent}/")
        try:
            self._put(link, json.dumps({"points_to": name}).encode())
        except CheckpointError as error:
            log.warning("%s Resuming finds the newest checkpoint without it.", error)

    def unpoint(self, link: RemotePath) -> None:
        if self.resolve(link) != link:
            self._remove(link)

    def _file(self, path: RemotePath, name: str) -> RemotePath:
        """The object that holds a file of a checkpoint."""
        if name == STATE:
            name = _state_in(self.read_marker(path) or b"") or STATE
        return path / name if name else path

    def _upload(self, file: RemotePath, state: Frozen) -> Written:
        with self._files.open_output_stream(_key(file), buffer_size=None) as stream:
            written = state.write(cast(io.RawIOBase, _BoundedUpload(stream)))
        nbytes = self._files.get_file_info(_key(file)).size
        if nbytes != written.nbytes:
            raise OSError(f"{file} has {nbytes} bytes instead of {written.nbytes}")
        return written

    def _put(self, file: RemotePath, content: bytes | memoryview) -> None:
        def put() -> None:
            with self._files.open_output_stream(_key(file)) as stream:
                stream.write(content)

        self._ask(f"{file} can't be written", put)

    def _get(self, file: RemotePath) -> bytes:
        def get() -> bytes:
            with self._files.open_input_file(_key(file)) as source:
                return source.read()

        return self._ask(f"{file} can't be read", get)

    def _remove(self, file: RemotePath) -> None:
        self._try_delete(f"{file} can't be deleted", lambda: self._files.delete_file(_key(file)))

    def _try_delete(self, problem: str, request: Callable[[], None]) -> None:
        """Delete something if it exists. A failure is logged, and a later `clean_up` tries again."""
        try:
            self._ask(problem, request)
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError) and "No such directory" not in str(error):
                log.warning("%s", error)

    def _info(self, path: RemotePath) -> pafs.FileInfo:
        return self._ask(f"{path} can't be asked for", lambda: self._files.get_file_info(_key(path)))

    def _list(self, directory: RemotePath) -> list[str]:
        """The names of all objects below a directory."""
        selector = pafs.FileSelector(_key(directory), recursive=True, allow_not_found=True)
        infos = self._ask(f"{directory} can't be listed", lambda: self._files.get_file_info(selector))
        start = len(_key(directory)) + 1
        return [info.path[start:] for info in infos if info.type == pafs.FileType.File]

    def _ask(self, problem: str, request: Callable[[], T]) -> T:
        """Make a request, and retry it while the service fails.

        Raises:
            CheckpointError: the error is final, or all retries failed.
        """
        for delay_s in (*DELAYS_S, None):
            try:
                return request()
            except (OSError, pa.ArrowException) as error:
                final = isinstance(error, (FileNotFoundError, PermissionError)) or _FINAL.search(str(error))
                if final or delay_s is None:
                    raise CheckpointError(f"{problem}: {_first_line(error)}.") from error
                log.info("%s: %s. Retrying in %g s.", problem, _first_line(error), delay_s)
                time.sleep(delay_s)
        raise AssertionError


class _BoundedUpload:
    """An upload that flushes before too many bytes are in flight."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._in_flight = 0

    def write(self, piece: bytes | memoryview) -> int:
        nbytes = memoryview(piece).nbytes
        self._stream.write(piece)
        self._in_flight += nbytes
        if self._in_flight >= _IN_FLIGHT_NBYTES:
            self._stream.flush()
            self._in_flight = 0
        return nbytes


class _RangeReader(io.RawIOBase):
    """Reads an object in ranges. A range that fails is retried."""

    def __init__(self, store: ObjectStore, file: RemotePath, source: pa.NativeFile) -> None:
        self._store = store
        self._path = file
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size()}[whence]
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = min(len(view), _REQUEST_NBYTES, self._source.size() - self._position)
        if nbytes <= 0:
            return 0
        content = self._store._ask(f"{self._path} can't be read", lambda: self._source.read_at(nbytes, self._position))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


@functools.lru_cache(maxsize=8)
def _filesystem(bucket: Address, settings: tuple[tuple[str, str], ...]) -> pafs.FileSystem:
    return connect(bucket, dict(settings), _ATTEMPTS)


def _address(path: RemotePath) -> Address:
    address = parse(path.uri)
    assert address is not None, path
    return address


def _key(path: RemotePath) -> str:
    """Bucket and key in pyarrow's form."""
    return _address(path).path


def _state_in(content: bytes) -> str:
    """The object that a marker names as the state; empty if the marker can't be read."""
    try:
        return str(json.loads(content)["files"][STATE].get("object", STATE))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
