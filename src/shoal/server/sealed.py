"""Tensors sealed: encrypted and authenticated with the processor's AES instructions.

CURVE protects everything that zmq sends, and is most of what a large tensor costs. A tensor sealed here (AEGIS-128L of
libsodium, which pyzmq brings along) costs a fraction of that. Its key is drawn at random for it alone and travels in
CURVE, on a ticket: whoever cannot read that can neither read nor make its pieces.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zmq

Part = bytes | memoryview

PIECE = 1 << 20
"""Bytes that are sealed at a time: what a core can encrypt without leaving its cache."""
TICKET = struct.Struct("<16s16s")
"""A tensor's number, by which its pieces are known, and the key that opens them."""
_PREFIX = struct.Struct("<16sI")
"""Before each piece: the number of its tensor, and its own. The second is the nonce of its cipher."""
_TAG = 32
_NUMBER = slice(0, 16)
_NONCE = 16
_KEY = 16


def new_ticket() -> bytes:
    """For one tensor, and never again."""
    return secrets.token_bytes(TICKET.size)


def can_seal() -> bool:
    """Whether this process can: pyzmq as a wheel has the library, and nearly every processor the instructions.

    >>> import zmq
    >>> can_seal() <= zmq.has("curve")
    True
    """
    return _library() is not None


def seal(payload: Part, ticket: bytes) -> Iterator[memoryview]:
    """The pieces of a tensor, as they travel. `payload` may change as soon as the last one is out.

    >>> ticket = new_ticket()
    >>> coming = Coming(ticket, 3)
    >>> [coming.take(piece) for piece in seal(b"abc", ticket)], bytes(coming.payload)
    ([True], b'abc')
    """
    library = _library()
    assert library is not None, "ask can_seal() first"
    number, key = TICKET.unpack(ticket)
    source = np.frombuffer(payload, np.uint8)
    start = source.__array_interface__["data"][0]
    for index, length in enumerate(_lengths(len(source))):
        made = np.empty(_PREFIX.size + length + _TAG, np.uint8)
        made[: _PREFIX.size] = np.frombuffer(_PREFIX.pack(number, index), np.uint8)
        target = made.__array_interface__["data"][0] + _PREFIX.size
        library.crypto_aead_aegis128l_encrypt(
            target, None, start + index * PIECE, length, None, 0, None, _nonce(index), key
        )
        yield made.data


class Coming:
    """A tensor whose pieces are on their way."""

    def __init__(self, ticket: Part, size: int) -> None:
        """`size`: its bytes."""
        self._number, self._key = TICKET.unpack(ticket)
        self._whole = np.empty(size, np.uint8)
        self._lengths = _lengths(size)
        self._next = 0

    @property
    def whole(self) -> bool:
        return self._next == len(self._lengths)

    @property
    def payload(self) -> memoryview:
        """The bytes, once it is whole."""
        return self._whole.data

    def take(self, piece: Part) -> bool:
        """Put a piece in its place; False if it is not the next one of this tensor, or not as it was sealed."""
        library = _library()
        if library is None or self.whole or bytes(piece[_NUMBER]) != self._number:
            return False
        length = self._lengths[self._next]
        if len(piece) != _PREFIX.size + length + _TAG:
            return False
        if _PREFIX.unpack_from(piece)[1] != self._next:
            return False
        source = np.frombuffer(piece, np.uint8).__array_interface__["data"][0] + _PREFIX.size
        target = self._whole.__array_interface__["data"][0] + self._next * PIECE
        opened = library.crypto_aead_aegis128l_decrypt(
            target, None, None, source, length + _TAG, None, 0, _nonce(self._next), self._key
        )
        if opened != 0:
            return False
        self._next += 1
        return True


def _lengths(size: int) -> list[int]:
    return [min(PIECE, size - at) for at in range(0, size, PIECE)]


def _nonce(index: int) -> bytes:
    return index.to_bytes(_NONCE, "little")


@functools.cache
def _library() -> ctypes.CDLL | None:
    """libsodium as zmq has loaded it. zmq may have been built without; then CURVE, if there, carries tensors too."""
    assert zmq.zmq_version_info() >= (4,)  # it is loaded, and its libraries with it
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split(maxsplit=5)[5] for line in lines if "/libsodium" in line)
        library = ctypes.CDLL(path)
        sizes = [getattr(library, f"crypto_aead_aegis128l_{name}bytes")() for name in ("a", "npub", "key")]
        # AEGIS without instructions for AES would be slower than CURVE; AES-GCM says whether they are there.
        ready = library.sodium_init() >= 0 and library.crypto_aead_aes256gcm_is_available() == 1
    except (OSError, StopIteration, AttributeError):
        return None
    if not ready or sizes != [_TAG, _NONCE, _KEY]:
        return None
    there, count, text = ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_char_p
    library.crypto_aead_aegis128l_encrypt.argtypes = [there] * 3 + [count, there, count, there, text, text]
    library.crypto_aead_aegis128l_decrypt.argtypes = [there] * 4 + [count, there, count, text, text]
    return library
