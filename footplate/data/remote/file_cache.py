"""A local disk cache of remote files. Bytes that were read once over the network are then read from the disk.

    Table("s3://lake/flowers", cache="/local/ssd/footplate")
    Table("s3://lake/flowers", cache=FileCache("/local/ssd/footplate", max_bytes=200 * 2**30))

Files are kept in blocks of 1 MiB. So of a large file, only the columns and row groups that are used take space. A block
is a file of its own, which is written under another name and renamed. So it is complete or doesn't exist, even if a
process dies. All processes of a node share the directory, and later runs find it filled.

    KEY/000017            block 17 and its checksum. KEY is a hash of the file's address, size and time of change
    locks/0..255          locked (flock) while an extent of 8 blocks is fetched. Other processes wait, then find the blocks
    locks/evict           locked by the process that deletes old blocks

Each use of a block sets its time. If the blocks take more than `max_bytes`, the least recently used blocks are deleted.
A process checks this when it begins, and each time it has added 1/32 of the limit. A block that another process deletes
meanwhile is fetched again. Bytes that can't be written (a full disk, for example) are passed on without being kept.

Each block ends with the CRC-32 of its key, its number and its bytes. A read compares length and checksum, and fetches a
damaged block again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from footplate.core.errors import DataError
from footplate.data.argument_checks import check_cache

BLOCK_BYTES = 1024 * 1024
EXTENT_BLOCKS = 8
_LOCKS = 256
# A temporary file of this age belongs to a process that has died.
_STALE_S = 3600.0
_FETCHERS = 4
_CHECKSUM_BYTES = 4

# Takes offset and length, and returns exactly these bytes.
Fetch = Callable[[int, int], bytes]


@dataclass(frozen=True)
class FileCache:
    """A directory that keeps blocks of remote files.

    Attributes:
        directory: a directory on a local disk. It is created if it doesn't exist.
        max_bytes: the largest size of the directory; by default half of the space that is free when it is opened.

    Examples:
        >>> from footplate.data import FileCache
        >>> table = fp.Table("flowers.parquet", cache=FileCache("cache", max_bytes=2**30))  # used if the table is remote
    """

    directory: str | os.PathLike[str]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_cache(self.directory)

    def open(self) -> BlockStore:
        """Open the directory, and create it if it doesn't exist.

        Raises:
            DataError: the directory can't be written.
        """
        root = Path(self.directory).absolute()
        try:
            (root / "locks").mkdir(parents=True, exist_ok=True)
            (root / "locks" / "evict").touch()
            return BlockStore(root, shutil.disk_usage(root).free // 2 if self.max_bytes is None else self.max_bytes)
        except OSError as error:
            raise DataError(
                f"cache={str(self.directory)!r} can't be used ({error.strerror or error}). Give a writable local "
                "directory, or no cache."
            ) from error


class BlockStore:
    """The blocks of a directory. Several threads and processes may use it at once.

    Args:
        root: the directory.
        max_bytes: the largest size of all blocks.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        # Bytes that were added since the last check of the limit. With this value, the first block leads to a check.
        self._added = max_bytes

    def read(self, identity: str, size: int, offset: int, length: int, fetch: Fetch) -> bytes:
        """Read some bytes of a file. Missing blocks are fetched and kept.

        Args:
            identity: identifies the file and its content.
            size: the size of the file, in bytes.
            offset: the first byte.
            length: the number of bytes, not beyond the end.
            fetch: reads from the network.
        """
        key = hashlib.sha1(identity.encode()).hexdigest()[:24]
        blocks = range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES))
        contents = {block: self._load(key, block, size) for block in blocks}
        missing = [block for block in blocks if contents[block] is None]
        extents = [list(run) for _, run in itertools.groupby(missing, lambda block: block // EXTENT_BLOCKS)]
        for fetched in _in_parallel(lambda run: self._fetch(key, run, size, fetch), extents):
            contents.update(fetched)
        data = b"".join(contents[block] or b"" for block in blocks)
        start = offset - blocks.start * BLOCK_BYTES
        return data[start : start + length]

    def _load(self, key: str, block: int, size: int) -> bytes | None:
        path = self._root / key / f"{block:06}"
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        return _verified(data, key, block, _bytes_of(block, size))

    def _fetch(self, key: str, blocks: list[int], size: int, fetch: Fetch) -> dict[int, bytes]:
        """Fetch neighbouring blocks of one extent with one request, unless another process was faster."""
        extent = blocks[0] // EXTENT_BLOCKS
        with self._lock(str(int(hashlib.sha1(f"{key}/{extent}".encode()).hexdigest(), 16) % _LOCKS)):
            contents = {block: self._load(key, block, size) for block in blocks}
            missing = [block for block in blocks if contents[block] is None]
            if missing:
                first, last = missing[0], missing[-1]
                start = first * BLOCK_BYTES
                data = fetch(start, last * BLOCK_BYTES + _bytes_of(last, size) - start)
                for block in range(first, last + 1):
                    contents[block] = data[block * BLOCK_BYTES - start :][:BLOCK_BYTES]
                    self._keep(key, block, contents[block] or b"")
        return {block: data for block, data in contents.items() if data is not None}

    def _keep(self, key: str, block: int, data: bytes) -> None:
        path = self._root / key / f"{block:06}"
        new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(exist_ok=True)
            with new.open("wb") as file:
                file.write(data)
                file.write(_checksum(key, block, data))
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            return

        self._added += len(data)
        if self._added >= self._max_bytes // 32:
            self._make_room()

    def _make_room(self) -> None:
        """Delete the least recently used blocks, down to the limit. Only one process at a time does this."""
        with contextlib.suppress(BlockingIOError), self._lock("evict", wait=False):
            self._added = 0
            entries = sorted(_files(self._root))
            total = sum(nbytes for _, nbytes, _ in entries)
            now = time.time()
            for used, nbytes, path in entries:
                is_stale = path.name.startswith(".") and now - used > _STALE_S
                if total > self._max_bytes or is_stale:
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()
                    total -= nbytes
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()

    @contextlib.contextmanager
    def _lock(self, name: str, wait: bool = True) -> Iterator[None]:
        with (self._root / "locks" / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each block was last used, its size and its path."""
    for directory in os.scandir(root):
        if directory.name == "locks" or not directory.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(directory.path):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    yield status.st_mtime, status.st_size, Path(entry.path)


def _verified(stored: bytes, key: str, block: int, nbytes: int) -> bytes | None:
    """Return the bytes of a block from what is stored on disk; None if it is damaged."""
    if len(stored) != nbytes + _CHECKSUM_BYTES:
        return None
    data = stored[:nbytes]
    return data if stored[nbytes:] == _checksum(key, block, data) else None


def _checksum(key: str, block: int, data: bytes) -> bytes:
    return zlib.crc32(data, zlib.crc32(f"{key}/{block}".encode())).to_bytes(_CHECKSUM_BYTES, "little")


def _bytes_of(block: int, size: int) -> int:
    return min(BLOCK_BYTES, size - block * BLOCK_BYTES)


def _in_parallel(work: Callable[[list[int]], dict[int, bytes]], runs: list[list[int]]) -> list[dict[int, bytes]]:
    if len(runs) < 2:
        return [work(run) for run in runs]
    with ThreadPoolExecutor(min(_FETCHERS, len(runs)), "footplate-fetch") as pool:
        return list(pool.map(work, runs))
