"""Sums of buckets over the workers, plain or compressed: reducers, residuals, the communication thread."""
