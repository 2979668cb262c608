"""Sealed tensors: encrypted and authenticated with AES-GCM, outside of CURVE.

CURVE (XSalsa20 and Poly1305 in software) is most of what a large tensor costs between hosts. AES-GCM, which
`cryptography` runs on the processor's AES instructions, costs a fraction. Each tensor has a random key of its own. The
key travels inside CURVE, on the tensor's ticket: whoever cannot read CURVE can neither read nor forge a piece.
"""

from __future__ import annotations

import functools
import secrets
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Part = bytes | memoryview

PIECE = 1 << 20
"""Bytes encrypted at a time: small enough for a core's cache."""
TICKET = struct.Struct("<16s16s")
"""The id of a tensor, which its pieces carry, and the AES-128 key that opens them."""
_PREFIX = struct.Struct("<16sI")
"""In clear before each piece: the id of its tensor, and the index of the piece. Authenticated as associated data."""
_TAG = 16
_NUMBER = slice(0, 16)
_NONCE = 12


def new_ticket() -> bytes:
    """A fresh id and key, for one tensor: `seal` must not see the same ticket with two payloads."""
    return secrets.token_bytes(TICKET.size)


def can_seal() -> bool:
    """Whether `cryptography` is installed (`pip install shoal[encryption]`); without it CURVE carries all tensors."""
    return _aesgcm() is not None


def seal(payload: Part, ticket: bytes) -> Iterator[memoryview]:
    """Encrypt a tensor piece by piece, each a copy. `payload` must not change before the last piece is out.

    >>> ticket = new_ticket()
    >>> coming = Coming(ticket, 3)
    >>> [coming.take(piece) for piece in seal(b"abc", ticket)], bytes(coming.payload)
    ([True], b'abc')
    """
    number, key = TICKET.unpack(ticket)
    cipher = _cipher(key)
    assert cipher is not None, "ask can_seal() first"
    source = memoryview(payload)
    for index, length in enumerate(_lengths(len(source))):
        prefix = _PREFIX.pack(number, index)
        # Not a bytearray, which would first be filled with zeros.
        sealed = np.empty(_PREFIX.size + length + _TAG, np.uint8).data
        sealed[: _PREFIX.size] = prefix
        clear = source[index * PIECE : index * PIECE + length]
        _encrypt(cipher, _nonce(index), clear, prefix, sealed[_PREFIX.size :])
        yield sealed


class Coming:
    """A tensor whose pieces are on their way."""

    def __init__(self, ticket: Part, size: int) -> None:
        """`size`: the tensor's bytes. A process without `cryptography` may be sent a ticket too: it takes no piece."""
        self._number, key = TICKET.unpack(ticket)
        self._cipher = _cipher(key)
        self._payload = np.empty(size, np.uint8).data
        self._lengths = _lengths(size)
        self._next = 0

    @property
    def whole(self) -> bool:
        """Whether every piece is there."""
        return self._next == len(self._lengths)

    @property
    def payload(self) -> memoryview:
        """The tensor's bytes; authentic only once it is `whole`."""
        return self._payload

    def take(self, piece: Part) -> bool:
        """Decrypt a piece into its place; False if it is not this tensor's next piece, or not as it was sealed."""
        if self._cipher is None or self.whole or bytes(piece[_NUMBER]) != self._number:
            return False
        length = self._lengths[self._next]
        if len(piece) != _PREFIX.size + length + _TAG:
            return False
        # Pieces come in order: another index is a forgery, or comes after a piece that is lost.
        if _PREFIX.unpack_from(piece)[1] != self._next:
            return False
        source = memoryview(piece)
        start = self._next * PIECE
        # A forged piece may leave garbage here. It does not count, so nobody reads it and a genuine one overwrites it.
        target = self._payload[start : start + length]
        prefix = source[: _PREFIX.size]
        if not _decrypt(self._cipher, _nonce(self._next), source[_PREFIX.size :], prefix, target):
            return False
        self._next += 1
        return True


def _lengths(size: int) -> list[int]:
    return [min(PIECE, size - at) for at in range(0, size, PIECE)]


def _nonce(index: int) -> bytes:
    """The nonce of a piece: its index.

    AES-GCM breaks if one key sees a nonce twice. It cannot here: a key is drawn for one tensor and seals it once, and
    within a tensor no two pieces have the same index.
    """
    return index.to_bytes(_NONCE, "little")


def _encrypt(cipher: AESGCM, nonce: bytes, clear: Part, associated: Part, target: memoryview) -> None:
    if hasattr(cipher, "encrypt_into"):
        cipher.encrypt_into(nonce, clear, associated, target)
    else:  # an older `cryptography`: one copy more
        target[:] = cipher.encrypt(nonce, clear, associated)


def _decrypt(cipher: AESGCM, nonce: bytes, sealed: Part, associated: Part, target: memoryview) -> bool:
    from cryptography.exceptions import InvalidTag

    try:
        if hasattr(cipher, "decrypt_into"):
            cipher.decrypt_into(nonce, sealed, associated, target)
        else:
            target[:] = cipher.decrypt(nonce, sealed, associated)
    except InvalidTag:
        return False
    return True


def _cipher(key: bytes) -> AESGCM | None:
    kind = _aesgcm()
    return None if kind is None else kind(key)


@functools.cache
def _aesgcm() -> type[AESGCM] | None:
    """Imported when the first wire with keys is made: jobs on one host have none, and do not pay for the import."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return None
    return AESGCM
