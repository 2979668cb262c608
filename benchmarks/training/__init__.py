"""Benchmarks of training steps: strategies beside torch's own, balance, the start of a job."""
