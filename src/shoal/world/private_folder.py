"""A temporary folder that is gone with the process that made it, also where that was killed.

Whoever is killed by SIGKILL removes nothing. So a shell waits at a pipe whose other end only the maker holds: when the
kernel closes it, the shell removes the folder. It has a session of its own, so that what ends the maker's process group
does not end it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_ADDRESS_BYTES = 108
"""`sun_path` of the kernel, with the zero at its end."""
_SHELL = "/bin/sh"
# A process that is being killed may still leave a file behind: once more after a second.
_SCRIPT = 'read -r _; rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }'


@dataclass(frozen=True)
class PrivateFolder:
    """Readable by its owner only."""

    path: str
    descriptor: int
    """While any process holds it, the folder stays: a forked child closes it."""


@contextmanager
def private_folder(prefix: str = "shoal-", within: str | None = None) -> Iterator[PrivateFolder]:
    """A new folder for as long as the block, or this process, lasts. `within`: None is the usual place.

    >>> with private_folder() as folder:
    ...     os.listdir(folder.path)
    []
    """
    path = tempfile.mkdtemp(prefix=prefix, dir=within)
    reads, writes = os.pipe2(os.O_CLOEXEC)
    try:
        remover = _start_remover(path, reads)
    finally:
        os.close(reads)
    try:
        yield PrivateFolder(path, writes)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(writes)
        os.waitpid(remover, 0)


@contextmanager
def socket_path(path: str) -> Iterator[str]:
    """`path`, or another name of it that fits into the address of a Unix socket: temporary folders may be deep.

    >>> with private_folder() as folder:
    ...     os.mkdir(f"{folder.path}/{'deep' * 30}")
    ...     with socket_path(f"{folder.path}/{'deep' * 30}/a.sock") as short:
    ...         len(short) < 40
    True
    """
    if len(os.fsencode(path)) < _ADDRESS_BYTES:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _start_remover(path: str, reads: int) -> int:
    actions = [
        (os.POSIX_SPAWN_DUP2, reads, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    command = [_SHELL, "-c", _SCRIPT, "shoal-remove", path]
    return os.posix_spawn(_SHELL, command, {"PATH": os.defpath}, file_actions=actions, setsid=True)
