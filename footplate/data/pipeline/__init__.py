"""From row groups to batches on a device: windows, decoding, collating, caches, prefetching."""
