"""Tags of messages between ranks, so that a message can be received from any source.

Messages themselves go through gloo, one connection per pair of ranks, where a receiver must say whom it expects. So
every sender also writes the tag of each message into a ring that its receiver can read, data first and counter
second. The receiver takes note of what has come each time it receives.
"""

from __future__ import annotations

import threading
from collections import deque

from shoal.world.shm.memory import SharedRegion

RING = 127
"""Messages of a pair of ranks whose tags are kept: as many may be under way before one is received."""
_WORDS = RING + 1


def mailbox_bytes(size: int) -> int:
    """Bytes of the rings of all pairs."""
    return size * size * _WORDS * 8


class Mailboxes:
    """The rings of a group: this rank writes those it sends by and reads those it receives by."""

    def __init__(self, region: SharedRegion, start: int, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._words = region.words(start, size * size * _WORDS)
        self._lock = threading.Lock()
        self._seen = [0] * size
        self._unclaimed: list[deque[int]] = [deque() for _ in range(size)]
        """By sender: the tags of messages that have come and that no receive has claimed."""
        self._early: list[deque[int]] = [deque() for _ in range(size)]
        """The tags of receives that were issued before their message came."""
        self._lost = 0
        """Tags that were written over before this rank read them."""

    def announce(self, peer: int, tag: int) -> None:
        """A message goes to `peer`."""
        start = (self._rank * self._size + peer) * _WORDS
        with self._lock:
            count = self._words[start]
            # The tag before the count: a reader that sees the count finds the tag (x86-64 keeps the order of stores).
            self._words[start + 1 + count % RING] = tag
            self._words[start] = count + 1

    def claim(self, source: int, tag: int) -> None:
        """The next message of that tag from `source` is received by name."""
        with self._lock:
            self._read(source)
            if tag in self._unclaimed[source]:
                self._unclaimed[source].remove(tag)
            else:
                self._early[source].append(tag)

    def claim_any(self, tag: int) -> int | None:
        """A rank that has sent a message of that tag which nobody has claimed, and that one is claimed; or None."""
        with self._lock:
            for source in range(self._size):
                self._read(source)
                if self._lost:
                    raise RuntimeError(
                        f"rank {source} had sent rank {self._rank} {RING + self._lost} messages before the first was "
                        f"received; receiving from any source needs at most {RING}. Receive by the rank's number."
                    )
                if tag in self._unclaimed[source]:
                    self._unclaimed[source].remove(tag)
                    return source
        return None

    def _read(self, source: int) -> None:
        start = (source * self._size + self._rank) * _WORDS
        count = self._words[start]
        lost = max(0, count - self._seen[source] - RING)
        self._lost += lost
        for number in range(self._seen[source] + lost, count):
            tag = self._words[start + 1 + number % RING]
            if tag in self._early[source]:
                self._early[source].remove(tag)
            else:
                self._unclaimed[source].append(tag)
        self._seen[source] = count
