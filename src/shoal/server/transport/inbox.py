"""What has arrived, in the order in which each sender sent it, though large tensors come another way than the rest.

A message whose tensor is sealed (cipher.py) arrives without it, and waits for its pieces; what its sender sent after it
waits behind it. Pieces come in the order of their messages: one of a later message says that those before it are lost.
Sans I/O: frames in, messages out, time as a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.server.protocol.messages import Message
from shoal.server.transport.cipher import PIECE, Coming, Part
from shoal.server.transport.frames import BadFrame, decode, sealed_size

PATIENCE = 10.0
"""Seconds that a message waits while no piece of its sender comes."""
_EARLY = 64
"""Pieces of a sender that came before their message and are kept: so many, the newest."""


@dataclass
class _Sealed:
    frames: Sequence[Part]
    coming: Coming


@dataclass
class _Early:
    """Pieces of one sender whose message has not come."""

    pieces: deque[bytes] = field(default_factory=lambda: deque(maxlen=_EARLY))
    moved: float = 0.0
    """When the last one came."""


@dataclass
class _Queue:
    """What one sender has sent and nobody has got yet."""

    letters: deque[Message | _Sealed] = field(default_factory=deque)
    moved: float = 0.0
    """When the first began to wait, or a piece came."""


class Inbox:
    """Everything that has arrived at one process."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, Message]] = []
        """Messages with their senders, to be taken out."""
        self.refused = 0
        """What was dropped because it was no message."""
        self._queues: dict[int, _Queue] = {}
        self._early: dict[int, _Early] = {}

    def letter(self, sender: int, frames: Sequence[Part], now: float) -> None:
        """A message has come, with its tensor or without."""
        try:
            size = sealed_size(frames)
            letter = decode(frames) if size is None else _Sealed(frames, Coming(frames[2], size))
        except (BadFrame, MemoryError):
            self.refused += 1
            return
        queue = self._queues.setdefault(sender, _Queue(moved=now))
        queue.letters.append(letter)
        if isinstance(letter, _Sealed):
            # Two sockets, two TCP streams: pieces may overtake the ticket that says whose they are.
            for piece in self._early.pop(sender, _Early()).pieces:
                self.piece(sender, piece, now)
        self._advance(sender)

    def piece(self, sender: int, piece: Part, now: float) -> None:
        """A piece of a tensor has come; or something that says so."""
        if not self._fit(sender, piece, now) and len(piece) <= 2 * PIECE:
            early = self._early.setdefault(sender, _Early())
            # A copy: the frame it lies in belongs to zmq and goes back to it.
            early.pieces.append(bytes(piece))
            early.moved = now
        self._advance(sender)

    def overdue(self, now: float) -> list[int]:
        """Whose messages have waited for too long for their pieces. They are dropped."""
        late = [sender for sender, queue in self._queues.items() if now - queue.moved > PATIENCE]
        for sender in late:
            self.cut(sender, now)
        for sender in [sender for sender, early in self._early.items() if now - early.moved > PATIENCE]:
            del self._early[sender]  # of messages that were dropped
        return late

    def cut(self, sender: int, now: float) -> None:
        """What still waits of one for pieces waits in vain."""
        self._early.pop(sender, None)
        queue = self._queues.get(sender)
        if queue is not None:
            queue.letters = deque(letter for letter in queue.letters if _is_whole(letter))
            queue.moved = now
            self._advance(sender)

    def take_ready(self) -> list[tuple[int, Message]]:
        """The messages that are complete, with their senders; each is given out once."""
        found = self.ready
        self.ready = []
        return found

    def forget(self, sender: int) -> None:
        """Drop what waits of one."""
        self._queues.pop(sender, None)
        self._early.pop(sender, None)

    def _fit(self, sender: int, piece: Part, now: float) -> bool:
        queue = self._queues.get(sender)
        if queue is None:
            return False
        for place, letter in enumerate(queue.letters):
            if isinstance(letter, _Sealed) and letter.coming.take(piece):
                queue.moved = now
                # Pieces come in the order of their tickets, so tensors announced before this one will not come any
                # more.
                kept = [before for before in list(queue.letters)[:place] if _is_whole(before)]
                queue.letters = deque([*kept, *list(queue.letters)[place:]])
                return True
        return False

    def _advance(self, sender: int) -> None:
        queue = self._queues.get(sender)
        if queue is None:
            return
        # Head of line only: the state machines rely on messages of one sender staying in order.
        while queue.letters and _is_whole(queue.letters[0]):
            letter = queue.letters.popleft()
            try:
                if isinstance(letter, _Sealed):
                    letter = decode(letter.frames, letter.coming.payload)
                self.ready.append((sender, letter))
            except BadFrame:
                self.refused += 1
        if not queue.letters:
            del self._queues[sender]


def _is_whole(letter: Message | _Sealed) -> bool:
    return not isinstance(letter, _Sealed) or letter.coming.whole
