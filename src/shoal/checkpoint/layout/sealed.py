"""Texts that show whether they have been changed, and files read and written whole. Nothing here imports torch.

A manifest, the pointer `latest` and what ranks tell each other are sealed JSON. What `shoal ckpt ls` and a run that
resumes want of thousands of manifests is what stands before their tensors: the `Head`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

FORMAT = 1
FILE = "manifest.json"

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


class NewerFormat(ValueError):
    """A manifest that a later version has written: nothing is wrong with it."""


@dataclass(frozen=True)
class Head:
    """What a manifest says before its tensors."""

    name: str
    step: int
    written: str
    plan: str
    workers: int
    keep: str
    """The retention that it was saved under and goes by; empty where somebody has asked for it by name."""
    nbytes: int
    """Of its files."""


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
        return json.loads(_body(text))
    except RecursionError:
        raise ValueError("it does not match its own checksum") from None


def read_head(text: bytes) -> Head:
    """The head of a manifest, without a look at its tensors; ValueError, with a reason, for what is none."""
    body = _body(text)
    # No string of JSON has these signs in it: there, a quotation mark follows a backslash.
    first, last = body.find(b',"versions":{'), body.rfind(b',"tensors":{')
    middle = body.rfind(b',"files":{', first, last)
    if 0 < first < middle < last and body.find(b',"state":{', first, middle) > 0:
        try:
            short = {**json.loads(body[:first] + b"}"), **json.loads(b"{" + body[middle + 1 : last] + b"}")}
            return head_of({"state": {}, "tensors": {}, **short})
        except (
            ValueError,
            RecursionError,
        ):  # another order than ours, or not to be believed: all of it will tell
            pass
    return head_of(unseal(text))


def head_of(body: object) -> Head:
    """Check what every manifest has; ValueError, with a reason, where it has not."""
    if not isinstance(body, dict):
        raise ValueError(f"it holds a {type(body).__name__}, and a manifest is an object")
    if body.get("format") != FORMAT:
        found = body.get("format")
        text = f"it has format {found}, and this version of shoal reads {FORMAT}"
        raise NewerFormat(text) if isinstance(found, int) and found > FORMAT else ValueError(text)
    missing = [
        key for key in ("name", "step", "written", "plan", "workers", "files", "tensors") if key not in body
    ]
    if missing:
        raise ValueError(f"an entry is missing or of the wrong kind ('{missing[0]}')")
    step = body["step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"its step is {step!r}, and steps are counted from 0")
    for key in ("state", "files", "tensors"):
        if not isinstance(body.get(key), dict):
            raise ValueError(f"an entry is missing or of the wrong kind ('{key}')")
    try:
        nbytes = sum(int(facts["bytes"]) for facts in body["files"].values())
        workers = int(body["workers"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"an entry is missing or of the wrong kind ({error})") from error
    written, plan = str(body["written"]), str(body["plan"])
    return Head(str(body["name"]), step, written, plan, workers, str(body.get("keep", "")), nbytes)


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


def _body(text: bytes) -> bytes:
    """What is sealed, if it has not been changed."""
    body = text[len(_BEFORE) + 16 + len(_BETWEEN) : -len(_AFTER)]
    head = b"".join([_BEFORE, checksum(body).encode(), _BETWEEN])
    if len(text) == len(head) + len(body) + len(_AFTER) and text.startswith(head) and text.endswith(_AFTER):
        return body
    raise ValueError("it does not match its own checksum")
