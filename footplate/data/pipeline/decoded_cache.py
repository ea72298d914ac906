"""The decoded cache: images as they come out of decoding and scaling, in a memory-mapped file that all ranks share.

    Loader(table, 64, shuffle=True, image_size=224, cache="/local/cache")

The first epoch decodes and keeps each row's pixels (uint8) under the row's number; from then on a row is a copy out of
the page cache, and the table's images are not read at all. A `transform` runs after the cache, so random augmentation
stays random. The file belongs to one content. Its key is the table's digest with all parts (`footplate.data.digest`), the
column, size and channels of its images, and the version of the decoder. Where the table lies is no part of the key, so a
copy of a Delta table shares the cache of the original.

    KEY.BOOT/pixels, KEY.BOOT/state      being filled: valid until the machine restarts, as nothing is forced to disk
    KEY/pixels, KEY/state                complete and forced to disk: valid for good

`state` has a byte for each row: 0 not yet, 1 there, 2 can't be decoded. It is set after the pixels are, so ranks and
runs may fill the same file at once. Space is reserved beforehand, for as many rows as `max_bytes` allows (half of the
free space by default); other rows are decoded each time.
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
from footplate.data.digest import Digest
from footplate.data.pipeline.images import ImageFormat, decode_into, decoder_version

JOIN_S = 30.0

_LAYOUT = 2  # of the files, and of how images are scaled
_MISSING, _THERE, _BAD = 0, 1, 2
_UNDECODABLE = "it could not be decoded when the cache was built"


@dataclass(frozen=True)
class DecodedCache:
    """Where decoded images are kept.

    Attributes:
        directory: on a local disk (a RAM disk does, too); made if need be.
        max_bytes: the most that one column of one table may take; by default half of the free space.
    """

    directory: str | os.PathLike[str]
    max_bytes: int | None = None

    def open(
        self, digest: Digest, column: str, format: ImageFormat, size: tuple[int, int], num_rows: int
    ) -> CachedImages:
        """The cache of one column, made if it isn't there.

        Args:
            digest: of the table.
            column: the image column.
            format: what its images become.
            size: (height, width) that they have then.
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
                place = complete if complete.exists() else filling
                if not place.exists():
                    for stale in root.glob(f"{key}.*-*"):
                        shutil.rmtree(stale)
                    _reserve(place, int(np.prod(shape)), num_rows, self.max_bytes)
                return CachedImages(place, complete, shape, format)
        except OSError as error:
            raise DataError(
                f"cache={str(root)!r} can't be used ({error.strerror or error}). Give a writable local directory with "
                "room, a smaller max_bytes, or no cache."
            ) from error


class CachedImages:
    """The pixels of one image column; safe to use from several threads and processes.

    Args:
        place: the directory that holds them.
        complete: what it is renamed to once every row is there.
        shape: (channels, height, width) of an image.
        format: how images become so.
    """

    def __init__(self, place: Path, complete: Path, shape: tuple[int, ...], format: ImageFormat) -> None:
        self._place, self._final, self._format = place, complete, format
        self._maps = [np.memmap(place / name, np.uint8, "r+") for name in ("pixels", "state")]
        self._pixels, self._state = (np.asarray(mapped) for mapped in self._maps)
        self._pixels = self._pixels.reshape(-1, *shape)
        self._sealing = place == complete
        self._sealer: threading.Thread | None = None

    def is_complete(self) -> bool:
        """Whether every row is there; the first time that it is so, the file begins to be forced to disk."""
        if len(self._pixels) < len(self._state) or not self._state.all():
            return False
        if not self._sealing:
            self._sealing = True
            self._sealer = threading.Thread(target=self._seal, name="footplate-seal", daemon=True)
            self._sealer.start()
        return True

    def close(self) -> None:
        """Wait until what is being forced to disk is there, for a bounded time."""
        if self._sealer is not None and join(self._sealer, JOIN_S, "the cached images are being forced to disk"):
            self._sealer = None

    def _seal(self) -> None:
        for mapped in self._maps:
            mapped.flush()
        with contextlib.suppress(OSError), _locked(self._final):  # so that nobody opens it under the old name meanwhile
            self._place.rename(
                self._final
            )  # fails if another rank was first, or the disk failed: then it stays as it was

    def fill(self, views: Sequence[np.ndarray | None], numbers: np.ndarray, out: np.ndarray) -> list[tuple[int, str]]:
        """Put rows into `out` (rows, channels, height, width): from the cache, or decoded and kept.

        Args:
            views: the encoded images; may be empty when the cache is complete.
            numbers: which row of the table each is, (rows,).
            out: where the pixels go.

        Returns:
            (row, reason) of those that can't be decoded.
        """
        kept = numbers < len(self._pixels)
        state = np.where(kept, self._state[numbers], _MISSING)
        there = np.flatnonzero(state == _THERE)
        if len(there) == len(out):
            np.take(self._pixels, numbers, axis=0, out=out, mode="clip")
            return []
        out[there] = self._pixels[numbers[there]]
        bad = [(int(row), _UNDECODABLE) for row in np.flatnonzero(state == _BAD)]
        for row in np.flatnonzero(state == _MISSING).tolist():
            failed = decode_into(views[row : row + 1], self._format, out[row : row + 1])
            if kept[row] and not failed:
                self._pixels[numbers[row]] = out[row]
            if kept[row]:
                self._state[numbers[row]] = _BAD if failed else _THERE
            bad += [(row, reason) for _, reason in failed]
        return bad


@contextlib.contextmanager
def _locked(complete: Path) -> Iterator[None]:
    """Hold the lock of a cache, by which processes agree on where it lies."""
    with complete.with_name(f"{complete.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _reserve(place: Path, row_bytes: int, num_rows: int, max_bytes: int | None) -> None:
    """Make a cache directory whose space is already taken, so that filling it can't fail."""
    most = shutil.disk_usage(place.parent).free // 2 if max_bytes is None else max_bytes
    rows = max(1, min(num_rows, most // row_bytes))
    new = place.with_name(f"{place.name}.{os.getpid()}.new")
    new.mkdir()
    try:
        for name, size in (("pixels", rows * row_bytes), ("state", num_rows)):
            with (new / name).open("wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
        new.rename(place)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _boot() -> str:
    """A name for the time since the machine was started; it contains a dash."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"boot-{int(psutil.boot_time())}"
