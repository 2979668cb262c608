"""Collectives on two levels: shared memory within a host, one stream per byte between hosts."""
