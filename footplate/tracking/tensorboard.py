"""`TensorBoard`: event files in the run's directory. View them with `tensorboard --logdir runs/flowers`.

The logger imports TensorBoard and uses its writer in a thread, because calls of the writer in a training loop have blocked
that loop. A resumed run tells TensorBoard to discard the steps after its checkpoint. A new run renames the older directory,
to `tensorboard-1`. `trainer.validate()` and `trainer.test()` add their results to the existing files.
"""

from __future__ import annotations

import importlib.util
import itertools
import struct
import time
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError
from footplate.core.optional import require
from footplate.tracking.base import Logger, Status
from footplate.tracking.file_moves import move_aside
from footplate.tracking.media import Media
from footplate.tracking.parameters import flatten, with_epoch
from footplate.tracking.writer import BackgroundWriter

CLOSE_TIMEOUT_S = 20.0


class TensorBoard(Logger):
    """Write metrics and hyper-parameters as TensorBoard events to `tensorboard/` in the run's directory.

    Raises:
        MissingExtra: TensorBoard is not installed.

    Examples:
        >>> trainer = fp.Trainer(max_epochs=1, logger=fp.TensorBoard(), default_root_dir="runs/board")
        >>> trainer.fit(model, train)  # then: tensorboard --logdir runs/board
    """

    name = "tensorboard"

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            require("tensorboard", "tensorboard", "The TensorBoard logger")
        self._resumed: dict[str, Any] | None = None
        # The directory of the last record.
        self._finalized: Path | None = None
        self._writer: BackgroundWriter | None = None
        self._events: Events | None = None
        self._step = 0

    def setup(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start or continue the event files. Raises ConfigError if they can't be written."""
        resumed, self._resumed = self._resumed, None
        self._step = resumed["step"] if resumed else 0
        is_new = resumed is None and self._finalized != run_dir / "tensorboard"
        self._begin(run_dir, hparams, is_new, purge_step=self._step + 1 if resumed else None)

    def append(self, run_dir: Path, hparams: dict[str, Any]) -> None:
        """Start another file in the existing directory. Raises ConfigError if it can't be written."""
        self._begin(run_dir, hparams, is_new=False, purge_step=None)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, epoch: int | None = None) -> None:
        """Write a scalar for each metric, and for the epoch if it is given."""
        if self._writer is not None:
            self._step = self._step if step is None else step
            self._writer.put((self._step, time.time(), with_epoch(metrics, epoch)))

    def write_media(self, media: Media, step: int | None) -> None:
        """Write an image, a histogram or a text; a figure as an image, and a table as a text."""
        if self._writer is not None:
            self._writer.put((self._step if step is None else step, time.time(), media))

    def finalize(self, status: Status) -> None:
        """Write the remaining records. If the same logger is set up again, it continues its record."""
        if self._writer is not None and self._events is not None:
            if self._writer.close(CLOSE_TIMEOUT_S):
                self._events.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """The last logged step."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The step after which the record continues."""
        self._resumed = state

    def _begin(self, run_dir: Path, hparams: dict[str, Any], is_new: bool, purge_step: int | None) -> None:
        directory = run_dir / "tensorboard"
        try:
            if is_new:
                move_aside(directory)
            directory.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The TensorBoard logger can't write {directory}: {error}. Choose another default_root_dir."
            ) from error
        self._finalized = directory
        self._events = Events(directory, hparams, purge_step)
        self._writer = BackgroundWriter("tensorboard", self._events.add)


class Events:
    """The event files, opened with the first records and used in one thread only."""

    def __init__(self, directory: Path, hparams: dict[str, Any], purge_step: int | None) -> None:
        self._directory = directory
        self._hparams = hparams
        self._purge_step = purge_step
        self._summaries: Any = None

    def add(self, records: list[tuple[int, float, dict[str, float] | Media]]) -> None:
        """Write records of (step, seconds since 1970, metrics or another value) and flush them to the disk."""
        if self._summaries is None:
            self._summaries = self._open()
        try:
            for step, wall_time, metrics in records:
                if isinstance(metrics, Media):
                    self._add_media(metrics, step, wall_time)
                    continue
                for name, value in metrics.items():
                    self._summaries.add_scalar(name, value, step, wall_time)
            self._summaries.flush()
        except OSError:
            # The writer's own queue is broken. The next attempt opens a new file.
            self._summaries = None
            raise

    def close(self) -> None:
        """Close the files."""
        if self._summaries is not None:
            self._summaries.close()

    def _add_media(self, media: Media, step: int, wall_time: float) -> None:
        tag = f"{media.key}/{media.index}" if media.index else media.key
        if media.kind in ("image", "figure"):
            self._summaries.file_writer.add_summary(_image(tag, media.data), step, wall_time)
        elif media.kind == "histogram":
            self._add_histogram(tag, media.parsed(), step, wall_time)
        elif media.kind == "text":
            self._summaries.add_text(tag, media.parsed(), step, wall_time)
        else:
            self._summaries.add_text(tag, _markdown(media.parsed()), step, wall_time)

    def _add_histogram(self, tag: str, content: dict[str, list[float]], step: int, wall_time: float) -> None:
        counts, edges = content["counts"], content["edges"]
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        self._summaries.add_histogram_raw(
            tag, edges[0], edges[-1], sum(counts),
            sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
            edges[1:], counts, step, walltime=wall_time,
        )  # fmt: skip

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams as summarise

        # TensorBoard reads the files in the order of their names. A name begins with the second of its creation and ends
        # with a number that isn't padded, so two files of the same second may be read in the wrong order.
        while any(self._directory.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.05)

        summaries = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        known = {
            name: value if isinstance(value, (bool, int, float)) else str(value)
            for name, value in flatten(self._hparams).items()
        }
        assert summaries.file_writer is not None
        # SummaryWriter.add_hparams would create another directory.
        for summary in summarise(known, {}):
            summaries.file_writer.add_summary(summary)
        return summaries


def _image(tag: str, png: bytes) -> Any:
    """Make the summary of a PNG file, whose header has the size and the kind of colour."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

    width, height, _, colour_type = struct.unpack(">IIBB", png[16:26])
    channels = {0: 1, 2: 3, 6: 4}[colour_type]
    image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _markdown(table: dict[str, Any]) -> str:
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["data"]]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
