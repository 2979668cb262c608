"""Benchmarks of state: memory of a worker, checkpoints."""
