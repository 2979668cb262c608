"""What a worker has put on the wire, or into shared memory, for others; by the usual formulas."""

from __future__ import annotations

from dataclasses import dataclass


def share_of(nbytes: int, workers: int) -> int:
    """Bytes that a worker sends in an all-gather or reduce-scatter of a tensor: all parts but its own.

    >>> share_of(300, workers=3)
    200
    """
    return nbytes * (workers - 1) // workers


def ring_bytes(nbytes: int, workers: int) -> int:
    """Bytes that a worker sends in an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * share_of(nbytes, workers)


@dataclass
class Traffic:
    """Counts that all worlds of a worker share.

    >>> traffic = Traffic()
    >>> traffic.count(300, elsewhere=2 / 3)
    >>> traffic.bytes_sent, traffic.bytes_between_hosts
    (300, 200)
    """

    bytes_sent: int = 0
    bytes_between_hosts: int = 0
    """Those of them that left the host; in a plain collective over hosts as if all went to everybody alike."""

    def count(self, nbytes: int, elsewhere: float) -> None:
        """So many bytes were sent, of which so large a share left the host."""
        self.bytes_sent += nbytes
        self.bytes_between_hosts += round(nbytes * elsewhere)

    def take(self, other: Traffic) -> None:
        """Count what another has counted, which begins anew."""
        self.bytes_sent += other.bytes_sent
        self.bytes_between_hosts += other.bytes_between_hosts
        other.bytes_sent = other.bytes_between_hosts = 0
