"""Benchmarks of data: the global order of samples, padding."""
