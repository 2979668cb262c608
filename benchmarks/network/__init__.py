"""Benchmark: strategies between two hosts, at several rates of the network."""
