"""Benchmarks of the parameter server."""
