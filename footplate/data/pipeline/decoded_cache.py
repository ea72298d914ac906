"""The decoded cache: decoded and scaled images in a memory-mapped file that all ranks of a node share.

    Loader(table, 64, shuffle=True, image_size=224, cache="/local/cache")

The first epoch decodes each row and keeps its pixels (uint8) under the row's number. From then on, a row is a copy out
of the page cache, and the table's images are not read at all. A `transform` runs after the cache, so random
augmentation stays random.

A file belongs to one content. Its key is the table's digest with all parts (`footplate.data.digest`), the column, size
and channels of its images, and the version of the decoder. The table's address is not part of the key. So a copy of a
Delta table shares the cache of the original.

    KEY.BOOT/pixels, KEY.BOOT/state      being filled. Valid until the machine restarts, since nothing is synced to disk
    KEY/pixels, KEY/state                complete and synced to disk. Valid permanently

`state` has one byte for each row: 0 missing, 1 present, 2 can't be decoded. It is written after the pixels, so ranks
and runs may fill the same file at once. Disk space is reserved beforehand, for as many rows as `max_bytes` allows (by
default half of the free space). Other rows are decoded each time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from footplate.core.errors import DataError
from footplate.core.hashing import hashed
from footplate.core.threads import join
from footplate.data.argument_checks import check_cache
from footplate.data.digest import Digest
from footplate.data.pipeline.images import ImageFormat, decode_into, decoder_version

JOIN_S = 30.0

# Change this with the layout of the files, or with the way in which images are scaled.
_LAYOUT = 2
_MISSING, _PRESENT, _BAD = 0, 1, 2
_UNDECODABLE = "it could not be decoded when the cache was built"


@dataclass(frozen=True)
class DecodedCache:
    """A directory that keeps decoded images.

    Attributes:
        directory: a directory on a local disk or a RAM disk. It is created if it doesn't exist.
        max_bytes: the largest size of one column of one table; by default half of the free space.

    Examples:
        >>> from footplate.data import DecodedCache
        >>> cache = DecodedCache("cache", max_bytes=2**30)
        >>> loader = fp.Loader(fp.Table(TABLES / "val"), batch_size=64, image_size=32, cache=cache)
    """

    directory: str | os.PathLike[str]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_cache(self.directory)

    def open(
        self, digest: Digest, column: str, format: ImageFormat, size: tuple[int, int], num_rows: int
    ) -> CachedImages:
        """Open the cache of one column, and create it if it doesn't exist.

        Args:
            digest: the table's digest.
            column: the image column.
            format: the format of its decoded images.
            size: their (height, width).
            num_rows: rows of the table.

        Raises:
            DataError: the directory can't be written, or the disk is full.
        """
        shape = (format.channels, *size)
        key = hashed(_LAYOUT, digest.key, column, shape, num_rows, decoder_version())[:20]
        root = Path(self.directory)
        complete, filling = root / key, root / f"{key}.{_boot()}"

        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(complete):
                directory = complete if complete.exists() else filling
                if not directory.exists():
                    # Files of an earlier boot may have lost pages that were never synced.
                    for stale in root.glob(f"{key}.*-*"):
                        shutil.rmtree(stale)
                    _reserve(directory, int(np.prod(shape)), num_rows, self.max_bytes)
                return CachedImages(directory, complete, shape, format)
        except OSError as error:
            raise DataError(
                f"cache={str(root)!r} can't be used ({error.strerror or error}). Give a writable local directory with "
                "room, a smaller max_bytes, or no cache."
            ) from error


class CachedImages:
    """The pixels of one image column. Several threads and processes may use it at once.

    Args:
        directory: the directory that holds them.
        complete: the name that the directory gets when every row is present.
        shape: (channels, height, width) of an image.
        format: the format to decode images to.
    """

    def __init__(self, directory: Path, complete: Path, shape: tuple[int, ...], format: ImageFormat) -> None:
        self._directory, self._final, self._format = directory, complete, format
        self._maps = [np.memmap(directory / name, np.uint8, "r+") for name in ("pixels", "state")]
        self._pixels, self._state = (np.asarray(mapped) for mapped in self._maps)
        self._pixels = self._pixels.reshape(-1, *shape)
        self._sealing = directory == complete
        self._sealer: threading.Thread | None = None

    def is_complete(self) -> bool:
        """Return True if every row is present. The first time, this starts to sync the file to disk in a thread."""
        if len(self._pixels) < len(self._state) or not self._state.all():
            return False
        if not self._sealing:
            self._sealing = True
            self._sealer = threading.Thread(target=self._seal, name="footplate-seal", daemon=True)
            self._sealer.start()
        return True

    def close(self) -> None:
        """Wait until the file is synced to disk, for at most `JOIN_S` seconds."""
        if self._sealer is not None and join(self._sealer, JOIN_S, "the cached images are being synced to disk"):
            self._sealer = None

    def _seal(self) -> None:
        for mapped in self._maps:
            mapped.flush()
        # The lock keeps other processes from opening the old name meanwhile. The rename fails if another rank was
        # faster, or if the disk failed. Then the old name stays.
        with contextlib.suppress(OSError), _locked(self._final):
            self._directory.rename(self._final)

    def fill(self, encoded: Sequence[np.ndarray | None], numbers: np.ndarray, out: np.ndarray) -> list[tuple[int, str]]:
        """Write rows into `out`, from the cache, or decode and keep them.

        Args:
            encoded: the encoded images; may be empty if the cache is complete.
            numbers: the number of each row in the table, (rows,).
            out: the memory for the pixels, (rows, channels, height, width).

        Returns:
            (row, reason) for rows that can't be decoded.
        """
        fits = numbers < len(self._pixels)
        state = np.where(fits, self._state[numbers], _MISSING)
        present = np.flatnonzero(state == _PRESENT)
        if len(present) == len(out):
            np.take(self._pixels, numbers, axis=0, out=out, mode="clip")
            return []

        out[present] = self._pixels[numbers[present]]
        bad = [(int(row), _UNDECODABLE) for row in np.flatnonzero(state == _BAD)]

        # The state is written after the pixels, so that no other process reads pixels that aren't there.
        for row in np.flatnonzero(state == _MISSING).tolist():
            failed = decode_into(encoded[row : row + 1], self._format, out[row : row + 1])
            if fits[row] and not failed:
                self._pixels[numbers[row]] = out[row]
            if fits[row]:
                self._state[numbers[row]] = _BAD if failed else _PRESENT
            bad += [(row, reason) for _, reason in failed]
        return bad


@contextlib.contextmanager
def _locked(complete: Path) -> Iterator[None]:
    """Hold the lock of a cache, so that processes agree on its directory."""
    with complete.with_name(f"{complete.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _reserve(directory: Path, row_bytes: int, num_rows: int, max_bytes: int | None) -> None:
    """Create a cache directory and reserve its disk space, so that filling it can't fail."""
    limit = shutil.disk_usage(directory.parent).free // 2 if max_bytes is None else max_bytes
    rows = max(1, min(num_rows, limit // row_bytes))

    new = directory.with_name(f"{directory.name}.{os.getpid()}.new")
    new.mkdir()
    try:
        for name, size in (("pixels", rows * row_bytes), ("state", num_rows)):
            with (new / name).open("wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
        new.rename(directory)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _boot() -> str:
    """Return an identifier of this boot of the machine. It contains a dash."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"boot-{int(psutil.boot_time())}"
