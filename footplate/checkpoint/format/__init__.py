"""File formats of a checkpoint: a run state as one flat file, and the shards of sharded tensors."""
