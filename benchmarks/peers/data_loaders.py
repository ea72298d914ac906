"""Measure one loader over one data set, in the environment that runs this file. Print one line of JSON.

    python data_loaders.py NAME DIRECTORY BATCH WORKERS SECONDS

The loader is opened and makes at least one pass, then more passes until SECONDS are over. The first batch is that of the
first pass. The steady rate leaves out the time to the first batch of each pass.

DIRECTORY holds the same rows in each loader's own format. Every loader decodes with the same function (`decode`), and
yields shuffled batches: uint8 (n, 3, 224, 224) and labels, float32 columns, or padded tokens. The clock leaves out imports,
for all entrants, and includes the opening of the data set.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch

ROOT = str(Path(__file__).parents[2])
sys.path.insert(0, ROOT)

SIZE = 224
SEQUENCE_LENGTH = 2048
IMPORTS = {
    "footplate": ("footplate.data.loader", "footplate.data.sources.opening", "deltalake", "cv2"),
    "torch": ("cv2", "torch.utils.data"),
    "webdataset": ("cv2", "webdataset"),
    "litdata": ("cv2", "litdata"),
    "mosaicml": ("cv2", "streaming"),
    "hf": ("cv2", "datasets"),
    "trl": ("datasets", "trl.data_utils"),
    "lance": ("cv2", "lance"),
    "ray": ("cv2", "ray.data"),
    "daft": ("cv2", "daft"),
    "petastorm": ("cv2", "PIL.Image", "petastorm.pytorch"),
    "limit": ("cv2", "pyarrow.parquet"),
}


def _found(directory, pattern):
    return sorted(str(path) for path in Path(directory).glob(pattern))


def decode(data):
    """Decode a picture's bytes to (3, 224, 224): Footplate's own decoding, which needs only OpenCV."""
    import cv2

    from footplate.data.pipeline import images

    cv2.setNumThreads(1)  # there is one process per core
    pixels = images.decode(np.frombuffer(data, np.uint8), images.ImageFormat(3, (SIZE, SIZE)))
    out = np.empty((3, SIZE, SIZE), np.uint8)
    images.write_planes(pixels, out)
    return out


def _loader(dataset, batch, workers, **options):
    if workers:
        options |= {"prefetch_factor": 4, "worker_init_fn": _one_thread}
    return torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=workers, **options)


def _one_thread(_):
    torch.set_num_threads(1)


class _Files(torch.utils.data.Dataset):
    def __init__(self, directory):
        self.files = _found(directory, "folder/*/*.jpg")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        return {"image": decode(Path(file).read_bytes()), "label": int(file.rsplit("/", 2)[1])}


def image_footplate(directory, batch, workers):
    from footplate.data import Loader, Table

    return Loader(Table(f"{directory}/delta"), batch, shuffle=True, image_size=SIZE, num_threads=workers or 1)


def image_footplate_cached(directory, batch, workers):
    from footplate.data import Loader, Table

    table = Table(f"{directory}/delta")
    loader = Loader(table, batch, shuffle=True, image_size=SIZE, num_threads=workers or 1, cache=f"{directory}/cache")
    if all(
        "." in path.name for path in Path(directory, "cache").glob("*")
    ):  # the first run fills the cache and isn't measured
        for _ in loader:
            pass
        next(iter(loader))
        for thread in threading.enumerate():
            if thread.name == "footplate-seal":
                thread.join()
    return loader


def image_torch_imagefolder(directory, batch, workers):
    return _loader(_Files(directory), batch, workers, shuffle=True)


def image_webdataset(directory, batch, workers):
    import webdataset as wds

    shards = _found(directory, "webdataset/*.tar")
    data = wds.WebDataset(shards, shardshuffle=len(shards), nodesplitter=wds.split_by_node).shuffle(1000)
    data = data.map(lambda row: {"image": decode(row["jpg"]), "label": int(row["cls"])})
    return _loader(data, batch, workers)


def image_litdata(directory, batch, workers):
    import litdata

    class Data(litdata.StreamingDataset):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {"image": decode(row["jpg"]), "label": row["label"]}

    data = Data(f"{directory}/litdata", shuffle=True)
    options = {"prefetch_factor": 4} if workers else {}
    return litdata.StreamingDataLoader(data, batch_size=batch, num_workers=workers, **options)


def image_mosaicml(directory, batch, workers):
    from streaming import StreamingDataset

    class Data(StreamingDataset):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {"image": decode(row["jpg"]), "label": row["label"]}

    return _loader(Data(local=f"{directory}/mds", shuffle=True, batch_size=batch), batch, workers)


def image_hf_map(directory, batch, workers):
    import datasets

    datasets.disable_progress_bars()
    files = _found(directory, "delta/*.parquet")
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{directory}/hf")
    return _loader(data.with_transform(_decode_column), batch, workers, shuffle=True)


def image_hf_streaming(directory, batch, workers):
    import datasets

    files = _found(directory, "delta/*.parquet")
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).shuffle(buffer_size=1000)
    return _loader(data.map(_decode_row).with_format("torch"), batch, workers)


def _decode_row(row):
    return {"image": decode(row["image"]), "label": row["label"]}


def _decode_column(rows):
    return {"image": [decode(data) for data in rows["image"]], "label": rows["label"]}


class _Lance(torch.utils.data.Dataset):
    """Random access to rows, one batch at a time. Each process opens the data set itself."""

    def __init__(self, directory, columns, finish):
        self.path, self.columns, self.finish = f"{directory}/lance", columns, finish
        self.data = None

    def __len__(self):
        import lance

        return lance.dataset(self.path).count_rows()

    def __getitems__(self, indices):
        import lance

        self.data = self.data or lance.dataset(self.path)
        return self.finish(self.data.take(indices, columns=self.columns))


def _lance_loader(data, batch, workers):
    spawn = {"multiprocessing_context": "spawn"} if workers else {}
    return _loader(data, batch, workers, shuffle=True, collate_fn=_as_it_is, **spawn)


def _as_it_is(batch):
    return batch


def _decode_table(table):
    images = np.stack([decode(data.as_buffer()) for data in table["image"]])
    return {"image": torch.from_numpy(images), "label": torch.from_numpy(table["label"].to_numpy())}


def image_lance(directory, batch, workers):
    return _lance_loader(_Lance(directory, ["image", "label"], _decode_table), batch, workers)


def image_ray(directory, batch, workers):
    data = _ray(workers).data.read_parquet(_found(directory, "delta/*.parquet"))
    data = data.map_batches(_decode_batch, batch_size=batch)
    return data.iter_torch_batches(batch_size=batch, local_shuffle_buffer_size=1000, prefetch_batches=4)


def _decode_batch(rows):
    return {"image": np.stack([decode(data) for data in rows["image"]]), "label": rows["label"]}


def _ray(workers):
    import ray
    import ray.data

    if not ray.is_initialized():
        theirs = {"env_vars": {"PYTHONPATH": ROOT}}
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=2 * 2**30,
            runtime_env=theirs,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def image_daft(directory, batch, workers):
    import daft

    @daft.func.batch(return_dtype=daft.DataType.tensor(daft.DataType.uint8(), (3, SIZE, SIZE)))
    def decoded(images):
        return [decode(data) for data in images.to_pylist()]

    data = daft.read_deltalake(f"{directory}/delta").shuffle().with_column("image", decoded(daft.col("image")))
    return _loader(data.to_torch_iter_dataset(), batch, 0)


def image_petastorm(directory, batch, workers):
    """Petastorm as its documentation shows, with the common decoder."""
    from petastorm.pytorch import DataLoader

    return DataLoader(_petastorm(directory, workers, decode), batch_size=batch, shuffling_queue_capacity=1000)


def image_petastorm_batched(directory, batch, workers):
    from petastorm.pytorch import BatchedDataLoader

    return BatchedDataLoader(_petastorm(directory, workers, decode), batch_size=batch, shuffling_queue_capacity=1000)


def image_petastorm_pillow(directory, batch, workers):
    """Petastorm as its documentation shows and as its users write it: a pandas transform that decodes with Pillow."""
    from petastorm.pytorch import DataLoader

    return DataLoader(_petastorm(directory, workers, _pillow), batch_size=batch, shuffling_queue_capacity=1000)


def _pillow(data):
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = SIZE / min(image.size)
    width, height = (max(SIZE, round(side * scale)) for side in image.size)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    image = image.resize((width, height)).crop((left, top, left + SIZE, top + SIZE))
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _petastorm(directory, workers, decoder):
    from petastorm import TransformSpec, make_batch_reader

    def transform(frame):
        frame["image"] = frame["image"].map(decoder)
        return frame

    spec = TransformSpec(transform, edit_fields=[("image", np.uint8, (3, SIZE, SIZE), False)])
    urls = [f"file://{path}" for path in _found(directory, "delta/*.parquet")]
    return make_batch_reader(urls, transform_spec=spec, num_epochs=1, workers_count=max(1, workers))


def tabular_footplate(directory, batch, workers):
    from footplate.data import Loader, Table

    return Loader(Table(f"{directory}/parquet"), batch, shuffle=True, num_threads=workers or 1)


def tabular_hf_streaming(directory, batch, workers):
    import datasets

    files = _found(directory, "parquet/*.parquet")
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return data.shuffle(buffer_size=100_000).with_format("torch").batch(batch)


def tabular_torch_memory(directory, batch, workers):
    """The whole table in memory, indexed by a permutation. It is fast if the memory suffices."""
    import pyarrow.parquet as pq

    table = pq.read_table(f"{directory}/parquet")
    columns = {name: torch.from_numpy(table[name].to_numpy()) for name in table.column_names}
    for rows in torch.randperm(table.num_rows).split(batch):
        yield {name: column[rows] for name, column in columns.items()}


def tabular_lance(directory, batch, workers):
    """Lance's own loader: contiguous batches of the file in random order, through a shuffle buffer."""
    from lance.torch.data import LanceDataset, ShardedBatchSampler

    sampler = ShardedBatchSampler(0, 1, randomize=True)
    return LanceDataset(f"{directory}/lance", batch_size=batch, sampler=sampler, batch_readahead=4)


def tabular_ray(directory, batch, workers):
    data = _ray(workers).data.read_parquet(_found(directory, "parquet/*.parquet"))
    return data.iter_torch_batches(batch_size=batch, local_shuffle_buffer_size=100_000, prefetch_batches=4)


def tabular_petastorm(directory, batch, workers):
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    urls = [f"file://{path}" for path in _found(directory, "parquet/*.parquet")]
    reader = make_batch_reader(urls, num_epochs=1, workers_count=10)
    return BatchedDataLoader(reader, batch_size=batch, shuffling_queue_capacity=100_000)


def tokens_footplate(directory, batch, workers):
    return tabular_footplate(directory, batch, workers)


def tokens_hf_map(directory, batch, workers):
    import datasets

    datasets.disable_progress_bars()
    files = _found(directory, "parquet/*.parquet")
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{directory}/hf")
    return _loader(data.with_format("torch"), batch, workers, shuffle=True, collate_fn=_pad)


def tokens_hf_streaming(directory, batch, workers):
    import datasets

    files = _found(directory, "parquet/*.parquet")
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).shuffle(buffer_size=10_000)
    return _loader(data.with_format("torch"), batch, workers, collate_fn=_pad)


def tokens_lance(directory, batch, workers):
    return _lance_loader(_Lance(directory, ["tokens"], _pad_table), batch, workers)


def _pad_table(table):
    return _pad([{"tokens": torch.from_numpy(row.values.to_numpy().astype(np.int64))} for row in table["tokens"]])


def _pad(rows):
    tokens = [row["tokens"] for row in rows]
    lengths = torch.tensor([len(row) for row in tokens])
    return {"tokens": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), "tokens_length": lengths}


def packed_footplate(directory, batch, workers):
    return _footplate_sequences(f"{directory}/parquet", batch, workers)


def _footplate_sequences(source, batch, workers):
    from footplate.data import Loader, Table

    for yielded in Loader(Table(source).pack(SEQUENCE_LENGTH), batch, shuffle=True, num_threads=workers or 1):
        yield {**yielded, "num_tokens": int(np.count_nonzero(yielded["document_ids"].numpy()))}


def packed_trl(directory, batch, workers):
    """TRL packs the whole data set before the first batch. Best fit, as Footplate does. Its caches are off."""
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    datasets.disable_caching()
    files = _found(directory, "parquet/*.parquet")
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{directory}/hf")
    data = pack_dataset(data, SEQUENCE_LENGTH, "bfd_split", {"num_proc": workers or None})
    return _loader(data.with_format("torch"), batch, workers, shuffle=True, collate_fn=_pad_packed)


def _pad_packed(rows):
    """Pad packed sequences, with the same ids as Footplate's."""
    shape = len(rows), SEQUENCE_LENGTH
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "document_ids", "position_ids")}
    for number, row in enumerate(rows):
        length, lengths = len(row["tokens"]), row["seq_lengths"]
        batch["tokens"][number, :length] = row["tokens"]
        batch["document_ids"][number, :length] = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        batch["position_ids"][number, :length] = torch.arange(length) - starts
    return {**batch, "num_tokens": sum(len(row["tokens"]) for row in rows)}


def packed_litdata(directory, batch, workers):
    """Tokens one after another, without boundaries of documents, from LitData's own format."""
    return _litdata_tokens(f"{directory}/litdata_tokens", batch, workers)


def _litdata_tokens(source, batch, workers):
    import litdata

    loader = litdata.TokensLoader(block_size=SEQUENCE_LENGTH)
    data = litdata.StreamingDataset(source, item_loader=loader, shuffle=True)
    options = {"prefetch_factor": 4} if workers else {}
    for tokens in litdata.StreamingDataLoader(data, batch_size=batch, num_workers=workers, **options):
        yield {"tokens": tokens.long(), "num_tokens": tokens.numel()}


def packed_mosaicml(directory, batch, workers):
    """Sequences of tokens one after another, without boundaries of documents, from Mosaic's own format."""
    return _mosaicml_tokens(None, f"{directory}/mds_tokens", batch, workers)


def _mosaicml_tokens(remote, local, batch, workers):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    data = StreamingDataset(remote=remote, local=local, shuffle=True, batch_size=batch)
    for yielded in _loader(data, batch, workers):
        yield {"tokens": yielded["tokens"].long(), "num_tokens": yielded["tokens"].numel()}


def streamed_footplate(directory, batch, workers):
    return _footplate_sequences("s3://lake/parquet", batch, workers)


def streamed_litdata(directory, batch, workers):
    """Each pass begins with an empty local directory."""
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    # LitData itself has no option to read from a server without TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    with tempfile.TemporaryDirectory(dir=directory) as local:
        yield from _litdata_tokens(Dir(path=local, url="s3://lake/litdata_tokens"), batch, workers)


def streamed_mosaicml(directory, batch, workers):
    """Each pass begins with an empty local directory."""
    with tempfile.TemporaryDirectory(dir=directory) as local:
        yield from _mosaicml_tokens("s3://lake/mds_tokens", local, batch, workers)


def image_limit(directory, batch, workers):
    """No loader: encoded images are in memory, and all cores decode them into reused memory."""
    from concurrent.futures import ThreadPoolExecutor

    from footplate.data.pipeline import images

    files = [np.fromfile(file, np.uint8) for file in _found(directory, "folder/*/*.jpg")]
    kept = threading.local()

    def some(start):
        if not hasattr(kept, "memory"):
            kept.memory = np.empty((batch, 3, SIZE, SIZE), np.uint8)
        part = files[start : start + batch]
        images.decode_into(part, images.ImageFormat(3, (SIZE, SIZE)), kept.memory)
        return len(part)

    with ThreadPoolExecutor(workers or 1) as pool:
        yield {"label": torch.zeros(0)}
        for rows in pool.map(some, range(0, len(files), batch)):
            yield {"label": torch.empty(rows)}


def tabular_limit(directory, batch, workers):
    """No loader: all cores read row groups into Arrow."""
    groups = _row_groups(directory)
    yield {"label": torch.zeros(0)}
    for table in _read_groups(groups, workers):
        yield {"label": torch.empty(table.num_rows)}


def _row_groups(directory):
    """The file and the number of each row group."""
    import pyarrow.parquet as pq

    files = _found(directory, "parquet/*.parquet")
    return [(path, index) for path in files for index in range(pq.ParquetFile(path).num_row_groups)]


def _read_groups(groups, workers):
    """Read row groups into Arrow, with a thread for each worker."""
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow.parquet as pq

    with ThreadPoolExecutor(workers or 1) as pool:
        yield from pool.map(lambda group: pq.ParquetFile(group[0]).read_row_group(group[1], use_threads=False), groups)


def tabular_floor(directory, batch, workers):
    """The least work of a shuffling loader: all cores read row groups, and each column is permuted into reused memory."""
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow.parquet as pq

    groups = _row_groups(directory)
    kept = threading.local()

    def read(group):
        table = pq.ParquetFile(group[0]).read_row_group(group[1], use_threads=False)
        order = np.random.permutation(table.num_rows)
        if not hasattr(kept, "memory"):
            kept.memory = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            array = column.chunk(0).to_numpy()
            out = kept.memory.setdefault((name, len(array)), np.empty_like(array))
            np.take(array, order, out=out, mode="clip")
        return table.num_rows

    with ThreadPoolExecutor(workers or 1) as pool:
        yield {"label": torch.zeros(0)}
        for rows in pool.map(read, groups):
            yield {"label": torch.empty(rows)}


tokens_limit = tabular_limit


def packed_limit(directory, batch, workers):
    """No loader: all cores read row groups into Arrow."""
    for table in _read_groups(_row_groups(directory), workers):
        tokens = sum(len(chunk.values) for chunk in table["tokens"].chunks)
        yield {"tokens": torch.empty(1, tokens), "num_tokens": tokens}


class Peak(threading.Thread):
    """Peak memory of this process and its children (proportional set size where the system has it)."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes = 0
        self.over = False

    def run(self):
        me = psutil.Process()
        while not self.over:
            total = 0
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error, AttributeError):
                    total += process.memory_full_info().pss
            self.bytes = max(self.bytes, total)
            time.sleep(0.2)


def cpu_seconds():
    seconds = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        # The kernel counts in ticks of 10 ms. A quick run may take less in this process, whose own clock is exact.
        if process == me:
            seconds += time.process_time() + times.children_user + times.children_system
        else:
            seconds += times.user + times.system
    return seconds


def _count(batch):
    """The rows of a batch; the tokens of one that counts them."""
    if "num_tokens" in batch:
        return batch["num_tokens"]
    return len(batch["label"] if "label" in batch else batch["tokens"])


def measure(name, directory, batch, workers, least_seconds):
    """Run one loader. Return its figures."""
    torch.set_num_threads(1)
    make = globals()[name]
    for module in IMPORTS.get(name.split("_")[1], ()):
        __import__(module)
    before_bytes = psutil.Process().memory_info().rss
    peak = Peak()
    peak.start()
    cpu, start = cpu_seconds(), time.perf_counter()
    rows = steady_rows = passes = places = 0
    seconds = steady_seconds = used = first = 0.0
    while seconds < least_seconds or not passes:
        began, first_rows, first_at = time.perf_counter(), 0, 0.0
        looked = began
        for yielded in make(directory, batch, workers):
            count = _count(yielded)
            places += yielded["tokens"].numel() if "num_tokens" in yielded else 0
            now = time.perf_counter()
            if not first_at:
                first_at, first_rows = now, count
            if now - looked > 0.5:  # measured during the pass, because workers have exited at its end
                used, looked = cpu_seconds() - cpu, now
            rows += count
            steady_rows += count
        ended = time.perf_counter()
        steady_rows -= first_rows
        steady_seconds += ended - first_at
        first = first or first_at - began
        seconds = ended - start
        passes += 1
    used = max(used, cpu_seconds() - cpu)
    peak.over = True
    return {
        "rows": rows,
        "passes": passes,
        "steady": steady_rows / steady_seconds,
        "whole": rows / seconds,
        "first_batch_s": first,
        "rows_per_cpu_s": rows / used,
        "peak_mb": (peak.bytes or before_bytes) / 2**20,
        **({"padding": 1 - rows / places} if places else {}),
    }


if __name__ == "__main__":
    name, directory, *numbers = sys.argv[1:]
    print("FIGURES " + json.dumps(measure(name, directory, int(numbers[0]), int(numbers[1]), float(numbers[2]))))
