"""`with_bagua` and the DDP hook, against DistributedDataParallel or one process on the whole batch."""
