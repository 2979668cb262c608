"""Bucketed data parallel, under ddp, zero1, zero2 and shared: buckets, gradient hooks, shard sums, optimizer state."""
