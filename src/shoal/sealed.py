"""Texts that show whether they have been changed, and files read and written whole. Nothing here imports torch.

Sealed JSON is what manifests of checkpoints and of stores, pointers and what ranks tell each other are written in.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

_BEFORE = b'{"checksum":"'
_BETWEEN = b'","manifest":'
_AFTER = b"}\n"
_CHUNK = 8 * 2**20
"""Bytes per call: other threads, and the training, get their turn in between."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def checksum(data: bytes | memoryview) -> str:
    """xxh3 of some bytes: 12 GB/s on one core, and no single flipped bit goes unseen."""
    return xxhash.xxh3_64_hexdigest(data)


def seal(body: object) -> bytes:
    """A JSON value as text that shows whether it has been changed.

    >>> unseal(seal({"a": 1}))
    {'a': 1}
    """
    text = json.dumps(body, separators=(",", ":")).encode()
    return b"".join([_BEFORE, checksum(text).encode(), _BETWEEN, text, _AFTER])


def unseal(text: bytes) -> Any:
    """The value in a sealed text; ValueError if it has been changed.

    >>> unseal(seal({"a": 1}).replace(b"1", b"2"))
    Traceback (most recent call last):
    ValueError: it does not match its own checksum
    """
    try:
        return json.loads(sealed_body(text))
    except RecursionError:
        raise ValueError("it does not match its own checksum") from None


def sealed_body(text: bytes) -> bytes:
    """What is sealed, if it has not been changed; else ValueError."""
    body = text[len(_BEFORE) + 16 + len(_BETWEEN) : -len(_AFTER)]
    head = b"".join([_BEFORE, checksum(body).encode(), _BETWEEN])
    if len(text) == len(head) + len(body) + len(_AFTER) and text.startswith(head) and text.endswith(_AFTER):
        return body
    raise ValueError("it does not match its own checksum")


def read_file(path: Path) -> bytes:
    """All of a plain file. A FIFO or a device, for which one could wait for ever, is a ValueError."""
    descriptor = open_plain(path)
    with open(descriptor, "rb") as file:
        return file.read()


def open_plain(path: Path) -> int:
    """Open a plain file for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise ValueError("it is a socket or a device, and no file") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise ValueError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, and no file")


def write_file(path: Path, parts: Iterable[bytes | memoryview], flush: bool = True) -> None:
    """Write parts one after the other and see them on the disk before returning; without `flush`, some time later."""
    with writing(path) as descriptor:
        for part in parts:
            left = memoryview(part).cast("B")
            while len(left):
                left = left[os.write(descriptor, left[:_CHUNK]) :]
        if flush:
            os.fsync(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[int]:
    """A file to write, from its beginning. What goes wrong in there names the file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
