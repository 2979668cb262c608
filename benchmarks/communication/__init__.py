"""Benchmarks of bytes between workers: collectives, two levels, compressors."""
