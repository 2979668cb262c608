"""Who is in charge: locks that the kernel takes back when their holder ends, however it ends.

The lock of a job's attempt is inherited by all of its processes. So while it is held, some of them live, and the job
is not started a second time; and after a reboot it is free.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

END_SECONDS = 30.0


def take(file: Path) -> int | None:
    """A descriptor that holds the lock until it is closed everywhere; None where another holds it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_held(file: Path) -> bool:
    """Whether any process holds it."""
    try:
        descriptor = take(file)
    except FileNotFoundError:  # nor has its folder ever been there
        return False
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def holders(file: Path) -> list[int]:
    """Processes that have the file of the lock open, besides this one."""
    try:
        facts = file.stat()
    except FileNotFoundError:
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{name}/fd"):
                with suppress(OSError):
                    other = os.stat(entry.path)
                    if (other.st_dev, other.st_ino) == (facts.st_dev, facts.st_ino):
                        found.append(int(name))
                        break
    return found


def end_holders(file: Path) -> None:
    """Kill the processes that hold it, and wait for their end: what a job left behind when it was over."""
    deadline = time.monotonic() + END_SECONDS
    while (pids := holders(file)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
