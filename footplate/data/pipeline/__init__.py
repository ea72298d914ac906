"""Pipeline from row groups to batches: windows in memory, decoding, collating, caching and prefetching."""
